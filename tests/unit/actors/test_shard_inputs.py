import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import Bucket, DecodeRow, PageUpdate, PrefillRow, SlotSampling, StepPlan
from actors.shard_inputs import step_inputs, write_page_updates, write_samplings
from models.slot_sampling import SamplingState
from models.state import SlotState

SCRATCH = 9
VOCAB = 70
NUM_WORDS = 3
small = st.integers(0, 8)
floats = st.floats(-100, 100, width=32)
ids = st.integers(0, 200_000)
samplings = st.builds(
    SlotSampling,
    slot=st.integers(0, 2),
    temperature=floats,
    top_k=st.integers(0, 2**31 - 1),
    top_p=floats,
    min_p=floats,
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    edits=st.lists(st.tuples(ids, floats | st.just(-math.inf), ids), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=2).map(tuple),
    prompt_len=st.integers(1, 10_000),
)


def masks_of(most: int) -> st.SearchStrategy[tuple[bytes, ...]]:
    size = 4 * NUM_WORDS
    return st.lists(st.binary(min_size=size, max_size=size), max_size=most).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    width = draw(st.integers(1, 5))
    decode = draw(
        st.lists(
            st.builds(
                DecodeRow,
                slot=small,
                position=st.integers(0, 10_000),
                num_drafts=small,
                propose=st.booleans(),
                prev_in_flight=st.booleans(),
            ),
            max_size=3,
        )
    )
    prefill = draw(
        st.lists(
            st.builds(
                PrefillRow,
                slot=small,
                start=st.integers(0, 10_000),
                token_ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=width).map(tuple),
                fresh=st.booleans(),
                last=st.booleans(),
                propose=st.booleans(),
                next_token_id=st.integers(-1, 200_000),
            ),
            max_size=3,
        )
    )
    num_emitting = len(decode) + sum(row.last for row in prefill)
    decode_size = len(decode) + draw(st.integers(0, 2))
    prefill_size = len(prefill) + draw(st.integers(0, 2))
    verify_width = draw(st.integers(1, 10))
    if draw(st.booleans()):
        decode = [replace(row, masks=draw(masks_of(verify_width))) for row in decode]
        prefill = [replace(row, masks=draw(masks_of(int(row.last)))) for row in prefill]
    bucket = Bucket(
        decode_rows=decode_size,
        verify_width=verify_width,
        prefill_rows=prefill_size,
        prefill_width=width,
        emitting_rows=num_emitting + draw(st.integers(0, 2)),
        num_drafts=draw(st.integers(0, 9)),
        num_tokens=decode_size * verify_width + prefill_size * width + draw(st.integers(0, 9)),
        context_pages=draw(st.integers(1, 10)),
        choosing=draw(st.sampled_from(["greedy", "sampled", "shaped"])),
        num_logprobs=draw(st.integers(-1, 20)),
        num_prompt_logprobs=draw(st.integers(-1, 20)),
        guided=any(row.masks for row in (*decode, *prefill)),
    )
    return StepPlan(step=1, bucket=bucket, decode=tuple(decode), prefill=tuple(prefill))


@given(plans())
def test_emitting_rows_are_decode_then_ends_of_prompts_then_padding(plan: StepPlan) -> None:
    assert plan.bucket is not None
    inputs = step_inputs(plan, SCRATCH, VOCAB)
    size = plan.bucket.emitting_rows
    assert inputs.emitting.dtype == inputs.proposed.dtype == torch.int32
    assert inputs.emitting.shape == inputs.proposed.shape == (size,)
    rows: list[tuple[int, DecodeRow | PrefillRow]] = list(enumerate(plan.decode))
    rows += [
        (i, row) for i, row in enumerate(plan.prefill, start=plan.bucket.decode_rows) if row.last
    ]
    for i in range(size):
        place, row = rows[i] if i < len(rows) else (-1, None)
        assert inputs.emitting[i].item() == place
        assert inputs.proposed[i].item() == (plan.bucket.num_drafts if row and row.propose else 0)


@given(plans())
def test_decode_rows_then_padding(plan: StepPlan) -> None:
    assert plan.bucket is not None
    inputs = step_inputs(plan, SCRATCH, VOCAB)
    size = plan.bucket.decode_rows
    columns = (
        (inputs.decode_slots, torch.int32),
        (inputs.decode_positions, torch.int32),
        (inputs.decode_num_drafts, torch.int32),
        (inputs.decode_in_flight, torch.bool),
        (inputs.decode_valid, torch.bool),
    )
    for tensor, dtype in columns:
        assert tensor.dtype == dtype
        assert tensor.shape == (size,)
    for i in range(size):
        found = tuple(tensor[i].item() for tensor, _ in columns)
        if i < len(plan.decode):
            row = plan.decode[i]
            expected: tuple[int, ...] = (
                row.slot,
                row.position,
                row.num_drafts,
                row.prev_in_flight,
                True,
            )
        else:
            expected = (SCRATCH, 0, 0, False, False)
        assert found == expected


@given(plans())
def test_prefill_rows_then_padding(plan: StepPlan) -> None:
    assert plan.bucket is not None
    inputs = step_inputs(plan, SCRATCH, VOCAB)
    size, width = plan.bucket.prefill_rows, plan.bucket.prefill_width
    columns = (
        (inputs.prefill_slots, torch.int32),
        (inputs.prefill_starts, torch.int32),
        (inputs.prefill_counts, torch.int32),
        (inputs.prefill_next, torch.int32),
        (inputs.prefill_fresh, torch.bool),
    )
    for tensor, dtype in columns:
        assert tensor.dtype == dtype
        assert tensor.shape == (size,)
    assert inputs.prefill_tokens.dtype == torch.int32
    assert inputs.prefill_tokens.shape == (size, width)
    for i in range(size):
        found = tuple(tensor[i].item() for tensor, _ in columns)
        tokens = [0] * width
        if i < len(plan.prefill):
            row = plan.prefill[i]
            expected: tuple[int, ...] = (
                row.slot,
                row.start,
                len(row.token_ids),
                row.next_token_id,
                row.fresh,
            )
            for j, token_id in enumerate(row.token_ids):
                tokens[j] = token_id
        else:
            expected = (SCRATCH, 0, 0, -1, False)
        assert found == expected
        assert inputs.prefill_tokens[i].tolist() == tokens


@given(plans())
def test_masks_stand_where_their_rows_decide(plan: StepPlan) -> None:
    """Behind each row of the decode grid, then, with prefill, one for each emitting row."""
    bucket = plan.bucket
    assert bucket is not None
    inputs = step_inputs(plan, SCRATCH, VOCAB)
    if not bucket.guided:
        assert inputs.masks is inputs.masked is None
        return
    expected: list[bytes | None] = []
    for i in range(bucket.decode_rows):
        for j in range(bucket.verify_width):
            masks = plan.decode[i].masks if i < len(plan.decode) else ()
            expected.append(masks[j] if j < len(masks) else None)
    if bucket.prefill_rows:
        ends = [row.masks for row in plan.prefill if row.last]
        behind = [None] * len(plan.decode) + [masks[0] if masks else None for masks in ends]
        expected += behind + [None] * (bucket.emitting_rows - len(behind))
    assert inputs.masks is not None
    assert inputs.masked is not None
    assert (inputs.masks.dtype, inputs.masked.dtype) == (torch.int32, torch.bool)
    assert inputs.masks.shape == (len(expected), NUM_WORDS)
    assert inputs.masked.tolist() == [mask is not None for mask in expected]
    for words, mask in zip(inputs.masks.tolist(), expected, strict=True):
        for token in range(VOCAB if mask is not None else 0):
            assert words[token // 32] >> token % 32 & 1 == mask[token // 8] >> token % 8 & 1


@given(plans())
def test_the_bucket_fixes_the_rest(plan: StepPlan) -> None:
    assert plan.bucket is not None
    inputs = step_inputs(plan, SCRATCH, VOCAB)
    assert inputs.verify_width == plan.bucket.verify_width
    assert inputs.num_tokens == plan.bucket.num_tokens
    assert inputs.context_pages == plan.bucket.context_pages
    assert inputs.choosing == plan.bucket.choosing
    assert inputs.num_logprobs == plan.bucket.num_logprobs
    assert inputs.num_prompt_logprobs == plan.bucket.num_prompt_logprobs


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.lists(st.integers(1, 99), max_size=3)),
        max_size=6,
    )
)
def test_page_updates_change_only_their_entries(updates: list[tuple[int, int, list[int]]]) -> None:
    state = SlotState.allocate(num_slots=3, num_drafts=2, num_pages=8)
    expected = [[0] * 8 for _ in range(4)]
    for slot, first, pages in updates:
        for i, page in enumerate(pages):
            expected[slot][first + i] = page
    plan = StepPlan(
        step=1,
        page_updates=tuple(
            PageUpdate(slot=slot, first=first, pages=tuple(pages)) for slot, first, pages in updates
        ),
    )
    write_page_updates(plan, state.block_table)
    assert state.block_table.tolist() == expected


@given(st.lists(samplings, max_size=5))
def test_a_slot_is_sampled_as_it_was_told_last(told: list[SlotSampling]) -> None:
    state = SamplingState.allocate(
        3, num_positions=1, num_edits=3, num_bad_words=2, bad_word_length=4
    )
    write_samplings(StepPlan(step=1, samplings=tuple(told)), state)
    last = {sampling.slot: sampling for sampling in told}
    for slot in range(4):
        rows = state.rows(torch.tensor([slot]), torch.tensor([7]))
        edits = [
            (int(token_id), float(value), int(until))
            for token_id, value, until in zip(
                state.edit_ids[slot], state.edit_values[slot], state.edit_until[slot], strict=True
            )
            if token_id >= 0
        ]
        words = [tuple(t for t in word if t >= 0) for word in state.bad_words[slot].tolist()]
        words = [word for word in words if word]
        if slot not in last:
            assert (rows.temperature.item(), edits, words) == (0.0, [], [])
            continue
        sampling = last[slot]
        assert rows.temperature.item() == sampling.temperature
        assert rows.top_k.item() == sampling.top_k
        assert rows.top_p.item() == sampling.top_p
        assert rows.min_p.item() == sampling.min_p
        low, high = rows.seeds[0].tolist()
        assert (high << 32) + (low & 0xFFFFFFFF) == sampling.seed
        assert rows.positions.tolist() == [7]
        assert state.presence[slot].item() == sampling.presence_penalty
        assert state.frequency[slot].item() == sampling.frequency_penalty
        assert state.repetition[slot].item() == sampling.repetition_penalty
        assert state.prompt_lens[slot].item() == sampling.prompt_len
        assert edits == list(sampling.edits)
        assert words == list(sampling.bad_words)
