from dataclasses import replace
from math import inf
from typing import Any

import pytest

from actors.choosing import asked, bucket_for, slot_sampling
from actors.config import EngineConfig
from actors.messages import Bucket, SamplingParams, StepOutput, StepPlan, TokenLogprobs
from actors.request import Request
from actors.scheduler import Scheduler
from actors.seeds import choice_seed
from tests.unit.actors.builders import EOS, GUIDE, engine_config, generate_request
from tests.unit.actors.fake_grammar import FakeGrammars

SHAPING: list[dict[str, Any]] = [
    {"presence_penalty": -0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": ((3, 0.0),)},
    {"bad_words": ((3,),)},
    {"min_tokens": 1},
]


def planned(config: EngineConfig, *samplings: dict[str, Any], prompt: int = 5) -> StepPlan:
    """The first step of requests that are sampled so."""
    scheduler = Scheduler(config, grammars=FakeGrammars())
    for i, fields in enumerate(samplings):
        request = generate_request(f"r{i}", prompt)
        scheduler.add(replace(request, sampling=SamplingParams(max_tokens=4, **fields)))
    return scheduler.schedule()


def bucket_of(plan: StepPlan) -> Bucket:
    assert plan.bucket is not None
    return plan.bucket


@pytest.mark.parametrize("fields", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 5}])
def test_a_greedy_step_asks_for_nothing_more(fields: dict[str, Any]) -> None:
    bucket = bucket_of(planned(engine_config(), fields, {}))
    assert bucket.choosing == "greedy"
    assert bucket.num_logprobs == bucket.num_prompt_logprobs == -1
    assert not bucket.guided


def test_a_step_chooses_as_the_most_demanding_of_its_requests() -> None:
    sampled = {"temperature": 1e-6}
    assert bucket_of(planned(engine_config(), {}, sampled)).choosing == "sampled"
    for fields in SHAPING:
        for others in ([], [{}], [sampled]):
            for both in ([*others, fields], [fields, *others], [*others, fields | sampled]):
                assert bucket_of(planned(engine_config(), *both)).choosing == "shaped"


def test_a_chunk_that_emits_nothing_is_fed_for_shaping_but_not_scored() -> None:
    """The history of a request begins with its first token."""
    config = engine_config(max_num_batched_tokens=16)
    fields = {"presence_penalty": 1.0, "logprobs": 2, "prompt_logprobs": 3}
    bucket = bucket_of(planned(config, fields, prompt=30))
    assert bucket.choosing == "shaped"
    assert bucket.num_logprobs == -1
    assert bucket.num_prompt_logprobs == 3


def test_a_step_scores_as_many_alternatives_as_any_request_wants() -> None:
    plan = planned(engine_config(), {"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 0})
    assert bucket_of(plan).num_logprobs == 5
    assert bucket_of(plan).num_prompt_logprobs == 0
    assert bucket_of(plan).choosing == "greedy"


def test_a_step_that_emits_for_a_guided_request_is_guided() -> None:
    config = engine_config(max_num_batched_tokens=16)
    assert bucket_of(planned(config, {}, {"guide": GUIDE})).guided
    assert bucket_of(planned(config, {"guide": GUIDE})).choosing == "greedy"
    assert not bucket_of(planned(config, {"guide": GUIDE}, prompt=30)).guided
    scheduler = Scheduler(config, grammars=FakeGrammars())
    scheduler.add(generate_request(max_tokens=20, guide=GUIDE))
    prefill = scheduler.schedule()
    scheduler.update(StepOutput(step=prefill.step, sampled=((9,),), num_drafts=(0,)), seconds=0.01)
    decode = scheduler.schedule()
    assert decode.decode
    assert bucket_of(decode).guided


def test_each_request_gets_the_alternatives_it_asked_for() -> None:
    found = [TokenLogprobs(logprob=-1.0, rank=2, top=((5, -0.5), (3, -1.0)))]
    assert asked(found, None) == ()
    assert asked(found, 0) == (TokenLogprobs(logprob=-1.0, rank=2),)
    assert asked(found, 1) == (TokenLogprobs(logprob=-1.0, rank=2, top=((5, -0.5),)),)
    assert asked(found, 2) == tuple(found)


def test_a_slot_is_told_everything_with_the_first_row() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "choice": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": ((3, 1.5), (9, -100.0)),
        "bad_words": ((4,), (5, 6)),
        "min_tokens": 2,
        "stop_token_ids": (9, 7),
    }
    (told,) = planned(engine_config(), fields, prompt=5).samplings
    named = ("temperature", "top_k", "top_p", "min_p", "bad_words")
    named += ("presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in named:
        assert getattr(told, name) == fields[name]
    assert told.seed == choice_seed(11, 2)
    assert told.prompt_len == 5
    # Biases hold to the end; nothing may end the first two tokens, at positions 5 and 6.
    forbidden = tuple((token_id, -inf, 7) for token_id in sorted((EOS, 7, 9)))
    assert told.edits == ((3, 1.5, 9), (9, -100.0, 9), *forbidden)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbid_what_would_end_the_request(ignore_eos: bool) -> None:
    fields = {"min_tokens": 3, "ignore_eos": ignore_eos, "stop_token_ids": (8,)}
    (told,) = planned(engine_config(), fields).samplings
    assert {token_id for token_id, _, _ in told.edits} == ({8} if ignore_eos else {EOS, 8})


def test_a_request_says_how_it_is_sampled_once() -> None:
    config = engine_config(max_num_batched_tokens=16)
    scheduler = Scheduler(config)
    scheduler.add(generate_request("a", 30, temperature=0.5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert len(first.samplings) == 1
    assert first.samplings[0].slot == first.prefill[0].slot
    assert second.prefill
    assert second.samplings == ()


def test_rows_of_other_requests_decide_nothing() -> None:
    """A slot that runs but is not in the step."""
    config = engine_config()
    plan = planned(config, {})
    message = replace(
        generate_request(), sampling=SamplingParams(max_tokens=4, temperature=1.0, logprobs=3)
    )
    other = Request(message=message, stop_token_ids=frozenset(), max_len=9, slot=3)
    plain = Request(message=generate_request(), stop_token_ids=frozenset(), max_len=9)
    running = {plan.prefill[0].slot: plain, 3: other}
    bucket = bucket_for(bucket_of(plan), [], plan.prefill, running)
    assert bucket == bucket_of(plan)
    assert slot_sampling(other).temperature == 1.0
