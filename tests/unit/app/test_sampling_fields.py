from typing import Any

import pytest

from actors.messages import SamplingParams
from app.openai import ChatRequest, CompletionRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def sampling(body: dict[str, Any]) -> SamplingParams:
    schema = CompletionRequest if "prompt" in body else ChatRequest
    return schema.model_validate(body).sampling(max_tokens=9)


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
def test_the_defaults_are_openais(body: dict[str, Any]) -> None:
    assert sampling(body) == SamplingParams(max_tokens=9, temperature=1.0)


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-6}, {"temperature": 1e-6}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.25}, {"min_p": 0.25}),
        ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
        ({"frequency_penalty": 1}, {"frequency_penalty": 1.0}),
        ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ({"logit_bias": {"0": -100, "12": 0.5}}, {"logit_bias": ((0, -100.0), (12, 0.5))}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [4, 5]}, {"stop_token_ids": (4, 5)}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
    ],
)
def test_every_field_acts(body: dict[str, Any], sent: dict[str, Any], got: dict[str, Any]) -> None:
    expected = SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **got})
    assert sampling(body | sent) == expected


@pytest.mark.parametrize(
    ("sent", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_logprobs_in_two_fields(
    sent: dict[str, Any], num_logprobs: int | None
) -> None:
    assert sampling(CHAT | sent).logprobs == num_logprobs
    assert sampling(CHAT | sent).prompt_logprobs is None


@pytest.mark.parametrize(
    ("sent", "num_logprobs", "num_prompt_logprobs"),
    [
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 20}, 20, None),
        ({"echo": True}, None, None),
        ({"echo": True, "logprobs": 3}, 3, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 3, 5),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3, 3),
        ({"echo": False, "logprobs": 3, "prompt_logprobs": 1}, 3, 1),
    ],
)
def test_an_echoed_prompt_has_the_logprobs_of_the_output(
    sent: dict[str, Any], num_logprobs: int | None, num_prompt_logprobs: int | None
) -> None:
    got = sampling(COMPLETION | sent)
    assert (got.logprobs, got.prompt_logprobs) == (num_logprobs, num_prompt_logprobs)
