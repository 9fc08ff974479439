from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from actors.errors import RequestRejected
from app.openai import ChatRequest, CompletionRequest, rejection

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refusal(schema: type[BaseModel], body: Any) -> RequestRejected:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return rejection(caught.value.errors())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 1, "n": 1, "seed": 7, "user": "someone"},
        {"temperature": None, "top_p": None, "stop": None, "stream": None, "max_tokens": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None},
        {"stop": "x", "stop_token_ids": [1, 2], "ignore_eos": True},
        {"stop": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}},
        {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_fields_that_act_or_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    ChatRequest.model_validate(CHAT | fields)
    CompletionRequest.model_validate(COMPLETION | fields)


def test_chat_fields_that_ask_for_nothing_pass() -> None:
    inert = {
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "reasoning_effort": None,
    }
    ChatRequest.model_validate(CHAT | inert)


@pytest.mark.parametrize("schema_body", [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"seed": 2**63}, "seed"),
        ({"model": None}, "model"),
        ({"best_off": 1}, "best_off"),
        ({"Foo": 1}, "Foo"),
        ({"str": 1}, "str"),
    ],
)
def test_everything_else_is_refused_by_name(
    schema_body: tuple[type[BaseModel], dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    schema, body = schema_body
    assert refusal(schema, body | fields).param == param


def test_sampling_is_refused_with_a_reason() -> None:
    assert "sampling is not available yet" in str(refusal(ChatRequest, CHAT | {"temperature": 1}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chats_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(ChatRequest, CHAT | fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_completions_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(CompletionRequest, COMPLETION | fields).param == param


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_must_be_an_object(body: Any) -> None:
    error = refusal(ChatRequest, body)
    assert (error.param, "JSON object" in str(error)) == (None, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], [])],
)
def test_a_prompt_and_a_list_of_one(prompt: Any, expected: Any) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, ("max_tokens", None)),
        ({"max_tokens": 5}, ("max_tokens", 5)),
        ({"max_completion_tokens": 6}, ("max_completion_tokens", 6)),
        ({"max_tokens": 5, "max_completion_tokens": 5}, ("max_completion_tokens", 5)),
    ],
)
def test_two_names_for_one_limit(fields: dict[str, Any], limit: tuple[str, int | None]) -> None:
    assert ChatRequest.model_validate(CHAT | fields).limit == limit


def test_messages_as_the_template_gets_them() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    chat = ChatRequest.model_validate({"model": "m", "messages": messages})
    assert [message.for_template() for message in chat.messages] == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
