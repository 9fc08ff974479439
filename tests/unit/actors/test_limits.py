from dataclasses import replace
from typing import Any

import pytest

from actors.errors import RequestRejected
from actors.limits import check_request
from actors.messages import GenerateRequest, Guide, SamplingParams
from tests.unit.actors.builders import VOCAB, engine_config, generate_request

NAN, INF = float("nan"), float("inf")


def request(**sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return replace(generate_request(), sampling=params)


@pytest.mark.parametrize(
    ("request_", "param", "named"),
    [
        (generate_request(prompt=()), "prompt", ["no tokens"]),
        (generate_request(prompt=(3, VOCAB)), "prompt", [str(VOCAB), "vocabulary"]),
        (generate_request(prompt=(3, -1)), "prompt", ["-1", str(VOCAB)]),
        (request(max_tokens=0), "max_tokens", ["max_tokens is 0", "1"]),
        (request(max_tokens=-5), "max_tokens", ["max_tokens is -5", "1"]),
        (request(temperature=2.5), "temperature", ["2.5", "0 to 2"]),
        (request(temperature=-0.1), "temperature", ["-0.1", "0 to 2"]),
        (request(temperature=NAN), "temperature", ["nan", "0 to 2"]),
        (request(temperature=INF), "temperature", ["inf", "0 to 2"]),
        (request(top_p=0.0), "top_p", ["0.0", "1"]),
        (request(top_p=1.1), "top_p", ["1.1", "1"]),
        (request(top_p=NAN), "top_p", ["nan", "1"]),
        (request(top_k=-1), "top_k", ["-1", "0 to"]),
        (request(top_k=2**31), "top_k", [str(2**31), str(2**31 - 1)]),
        (request(min_p=-0.1), "min_p", ["-0.1", "0 to 1"]),
        (request(min_p=1.5), "min_p", ["1.5", "0 to 1"]),
        (request(seed=2**64), "seed", [str(2**64)]),
        (request(seed=-(2**63) - 1), "seed", [str(-(2**63) - 1)]),
        (request(choice=-1), "choice", ["-1", "0 to"]),
        (request(presence_penalty=2.5), "presence_penalty", ["2.5", "-2 to 2"]),
        (request(frequency_penalty=-2.5), "frequency_penalty", ["-2.5", "-2 to 2"]),
        (request(frequency_penalty=NAN), "frequency_penalty", ["nan", "-2 to 2"]),
        (request(repetition_penalty=0.0), "repetition_penalty", ["0.0", "0.01 to 100"]),
        # 1e300 is no float32, and a logit by 1e-50 is none.
        (request(repetition_penalty=1e300), "repetition_penalty", ["1e+300", "0.01 to 100"]),
        (request(repetition_penalty=1e-50), "repetition_penalty", ["1e-50", "0.01 to 100"]),
        (request(repetition_penalty=INF), "repetition_penalty", ["inf", "0.01 to 100"]),
        (request(repetition_penalty=NAN), "repetition_penalty", ["nan", "0.01 to 100"]),
        (request(logit_bias=((VOCAB, 1.0),)), "logit_bias", [str(VOCAB), "vocabulary"]),
        (request(logit_bias=((3, 101.0),)), "logit_bias", ["3", "101", "-100 to 100"]),
        (request(logit_bias=((3, NAN),)), "logit_bias", ["3", "nan"]),
        (request(logit_bias=((3, 1.0), (3, 2.0))), "logit_bias", ["twice"]),
        (request(logit_bias=((3, 1.0),) * 301), "logit_bias", ["301", "300"]),
        (request(bad_words=((3,), ())), "bad_words", ["no tokens"]),
        (request(bad_words=((3, VOCAB),)), "bad_words", [str(VOCAB), "vocabulary"]),
        (request(bad_words=((3,),) * 129), "bad_words", ["129", "128"]),
        (request(bad_words=((3,) * 33,)), "bad_words", ["33", "32"]),
        (request(min_tokens=-1), "min_tokens", ["-1", "0 to"]),
        (request(min_tokens=5), "min_tokens", ["5", "max_tokens", "4"]),
        (request(stop_token_ids=(VOCAB,)), "stop_token_ids", [str(VOCAB), "vocabulary"]),
        (
            request(stop_token_ids=(3,) * 65, min_tokens=1),
            "stop_token_ids",
            ["65", "64", "min_tokens"],
        ),
        (request(logprobs=-1), "logprobs", ["-1", "0 to 20"]),
        (request(logprobs=21), "logprobs", ["21", "0 to 20"]),
        (request(prompt_logprobs=21), "prompt_logprobs", ["21", "0 to 20"]),
        (request(guide=Guide(kind="xml", source="x")), "guide", ["xml", "json_schema"]),
        (request(guide=Guide(kind="regex")), "guide", ["regex", "empty"]),
        (generate_request(emitted_token_ids=(99,)), "emitted_token_ids", ["99"]),
        (generate_request(max_tokens=2, emitted_token_ids=(1, 1)), "emitted_token_ids", ["2"]),
        (request(guide=Guide(kind="json_object", source="x")), "guide", ["json_object"]),
        (replace(generate_request(), priority=2**63), "priority", [str(2**63), "64"]),
        (replace(generate_request(), max_draft_tokens=-1), "max_draft_tokens", ["-1", "0"]),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(
    request_: GenerateRequest, param: str, named: list[str]
) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_request(engine_config(), request_)
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "request_",
    [
        request(temperature=2, top_p=1e-9, top_k=2**31 - 1, min_p=1),
        request(seed=2**63 - 1, choice=31, min_tokens=4),
        request(seed=-(2**63), max_tokens=10**6),
        request(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01),
        request(repetition_penalty=100),
        request(logit_bias=tuple((i % VOCAB, 100.0) for i in range(VOCAB))),
        request(logit_bias=((0, -100.0),), bad_words=((3, 4),) * 128),
        request(logprobs=0, prompt_logprobs=20),
        request(bad_words=((3,) * 32,), stop_token_ids=(3,) * 64, min_tokens=1),
        request(stop_token_ids=(3,) * 2000),
        replace(generate_request(), priority=-(2**63), cache_salt="x", max_draft_tokens=99),
    ],
)
def test_the_limits_themselves_are_served(request_: GenerateRequest) -> None:
    check_request(engine_config(), request_)


def test_drafts_need_a_drafter() -> None:
    plain = engine_config(num_drafts=0)
    check_request(plain, replace(generate_request(), max_draft_tokens=0))
    with pytest.raises(RequestRejected, match="has no drafter") as caught:
        check_request(plain, replace(generate_request(), max_draft_tokens=1))
    assert caught.value.param == "max_draft_tokens"


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_at_or_over_the_limit_is_refused(length: int) -> None:
    with pytest.raises(RequestRejected, match=f"{length} tokens, the limit is 63") as caught:
        check_request(engine_config(max_model_len=64), generate_request("a", length))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [0, VOCAB - 1])
def test_the_whole_vocabulary_is_served(token_id: int) -> None:
    check_request(engine_config(), generate_request(prompt=(token_id,)))
