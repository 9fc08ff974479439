import dataclasses
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import (
    Bucket,
    DecodeRow,
    GenerateRequest,
    PageUpdate,
    PrefillRow,
    SamplingParams,
    SlotSampling,
    SpeculationStats,
    StepOutput,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
    decode_output,
    decode_plan,
    encode,
)

counts = st.integers(0, 2**31 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False)
token_ids = st.lists(counts, max_size=6).map(tuple)
masks = st.lists(st.binary(max_size=8), max_size=3).map(tuple)
buckets = st.builds(
    Bucket,
    decode_rows=counts,
    verify_width=counts,
    num_drafts=counts,
    prefill_rows=counts,
    prefill_width=counts,
    emitting_rows=counts,
    num_tokens=counts,
    context_pages=counts,
    choosing=st.sampled_from(["greedy", "sampled", "shaped"]),
    num_logprobs=st.integers(-1, 20),
    num_prompt_logprobs=st.integers(-1, 20),
    guided=st.booleans(),
)
decode_rows = st.builds(
    DecodeRow,
    slot=counts,
    position=counts,
    num_drafts=counts,
    propose=st.booleans(),
    prev_in_flight=st.booleans(),
    masks=masks,
)
prefill_rows = st.builds(
    PrefillRow,
    slot=counts,
    start=counts,
    token_ids=token_ids,
    fresh=st.booleans(),
    last=st.booleans(),
    propose=st.booleans(),
    next_token_id=st.integers(-1, 2**31 - 1),
    masks=masks,
)
samplings = st.builds(
    SlotSampling,
    slot=counts,
    temperature=numbers,
    top_k=counts,
    top_p=numbers,
    min_p=numbers,
    seed=seeds,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    edits=st.lists(st.tuples(counts, numbers, counts), max_size=3).map(tuple),
    bad_words=st.lists(token_ids, max_size=3).map(tuple),
    prompt_len=counts,
)
token_logprobs = st.builds(
    TokenLogprobs,
    logprob=numbers,
    rank=counts,
    top=st.lists(st.tuples(counts, numbers), max_size=3).map(tuple),
)
logprobs = st.lists(st.lists(token_logprobs, max_size=3).map(tuple), max_size=3).map(tuple)
plans = st.builds(
    StepPlan,
    step=counts,
    bucket=st.none() | buckets,
    decode=st.lists(decode_rows, max_size=3).map(tuple),
    prefill=st.lists(prefill_rows, max_size=3).map(tuple),
    page_updates=st.lists(
        st.builds(PageUpdate, slot=counts, first=counts, pages=token_ids), max_size=3
    ).map(tuple),
    samplings=st.lists(samplings, max_size=2).map(tuple),
)
outputs = st.builds(
    StepOutput,
    step=counts,
    sampled=st.lists(token_ids, max_size=4).map(tuple),
    num_drafts=token_ids,
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    drafts=st.lists(token_ids, max_size=4).map(tuple),
    late_compiles=counts,
)


@given(plans)
def test_plans_survive_the_wire(plan: StepPlan) -> None:
    assert decode_plan(encode(plan)) == plan


@given(st.none() | outputs)
def test_outputs_survive_the_wire(output: StepOutput | None) -> None:
    assert decode_output(encode(output)) == output


@given(plans.filter(lambda plan: plan.decode or plan.prefill), st.data())
def test_a_truncated_message_is_rejected(plan: StepPlan, data: st.DataObject) -> None:
    payload = encode(plan)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(msgspec.DecodeError):
        decode_plan(payload[:cut])


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        {},
        {"step": "1"},
        {"step": 1, "bucket": {"decode_rows": 1}},
        {"step": 1, "decode": [{"slot": 0}]},
        {"step": 1, "prefill": 3},
        {"step": 1, "page_updates": [{"slot": 0, "first": 0, "pages": [1.5]}]},
    ],
)
def test_what_is_not_a_plan_is_rejected(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_plan(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "value",
    [7, [], {}, {"step": None}, {"step": 1, "sampled": [1]}, {"step": 1, "num_drafts": [None]}],
)
def test_what_is_not_an_output_is_rejected(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_output(msgspec.msgpack.encode(value))


def test_a_full_decode_step_is_small() -> None:
    rows = tuple(
        DecodeRow(
            slot=i,
            position=8000 + i,
            num_drafts=9,
            propose=True,
            prev_in_flight=True,
        )
        for i in range(8)
    )
    bucket = Bucket(
        decode_rows=8,
        verify_width=10,
        prefill_rows=4,
        prefill_width=64,
        emitting_rows=9,
        num_drafts=9,
        num_tokens=8 * 10 + 4 * 64,
        context_pages=512,
    )
    prefill = tuple(
        PrefillRow(
            slot=8,
            start=64 * i,
            token_ids=tuple(range(150_000, 150_064)),
            fresh=i == 0,
            last=i == 3,
            propose=True,
            next_token_id=150_064,
        )
        for i in range(4)
    )
    plan = StepPlan(step=10**6, bucket=bucket, decode=rows, prefill=prefill)
    assert len(encode(plan)) < 4096
    output = StepOutput(
        step=10**6, sampled=(tuple(range(150_000, 150_010)),) * 8, num_drafts=(9,) * 8
    )
    assert len(encode(output)) < 4096


def test_acceptance_length_is_tokens_per_verify_step() -> None:
    stats = SpeculationStats(verify_steps=4, draft_tokens=36, accepted_tokens=6, emitted_tokens=10)
    assert stats.mean_acceptance_length == 2.5
    assert SpeculationStats().mean_acceptance_length is None


def test_messages_cross_ray_and_stay_frozen() -> None:
    request = GenerateRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3)
    )
    chunk = TokenChunk(request_id="a", first_index=0, token_ids=(4,))
    for message in (request, chunk):
        assert pickle.loads(pickle.dumps(message)) == message
        with pytest.raises(dataclasses.FrozenInstanceError):
            message.request_id = "b"  # type: ignore[misc]
