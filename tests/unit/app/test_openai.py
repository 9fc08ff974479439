from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from actors.errors import RequestRejected
from app.openai import ChatRequest, CompletionRequest
from app.strict import rejection

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refusal(schema: type[BaseModel], body: Any) -> RequestRejected:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return rejection(caught.value.errors())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2, "top_p": 1, "n": 32, "seed": -(2**63), "user": "someone"},
        {"temperature": None, "top_p": None, "stop": None, "stream": None, "max_tokens": None},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "logit_bias": {}, "logprobs": None},
        {"stop": "x", "stop_token_ids": [1, 2], "ignore_eos": True},
        {"stop": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}},
        {"top_k": -1, "min_p": 1, "repetition_penalty": 0.1, "min_tokens": 0},
        {"response_format": {"type": "text"}, "guided_regex": "a+"},
        {"priority": -5, "cache_salt": "mine", "return_token_ids": False},
        {"speculative": {}, "bad_words": [], "prompt_logprobs": 20},
        {"speculative": {"enabled": False, "max_draft_tokens": 0}},
    ],
)
def test_fields_within_their_ranges_pass(fields: dict[str, Any]) -> None:
    ChatRequest.model_validate(CHAT | fields)
    CompletionRequest.model_validate(COMPLETION | fields)


def test_chat_fields_that_ask_for_nothing_pass() -> None:
    inert = {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "reasoning_effort": None,
    }
    ChatRequest.model_validate(CHAT | inert)


@pytest.mark.parametrize("schema_body", [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 33}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"speculative": True}, "speculative"),
        ({"speculative": {"enabled": 1}}, "speculative.enabled"),
        ({"speculative": {"max_draft_tokens": -1}}, "speculative.max_draft_tokens"),
        (
            {"speculative": {"enabled": False, "max_draft_tokens": 2}},
            "speculative.max_draft_tokens",
        ),
        ({"speculative": {"draft_model": "x"}}, "speculative.draft_model"),
        ({"ignore_eos": 1}, "ignore_eos"),
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


@pytest.mark.parametrize("name", ["05", "-5", "+5", " 5", "5.0", "", "x", "٥", "9" * 5000])
def test_a_logit_bias_is_by_token_id(name: str) -> None:
    error = refusal(ChatRequest, CHAT | {"logit_bias": {name: 1}})
    assert error.param is not None
    assert error.param.startswith("logit_bias")


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
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 1}, "best_of"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chats_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(ChatRequest, CHAT | fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], [2, "b"]]}, "prompt[1][1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 32}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
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
    [
        ("hi", ("hi",)),
        (["hi"], ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([], ((),)),
    ],
)
def test_prompts_come_in_four_ways(prompt: Any, expected: Any) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompts == expected


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
