"""The drafter's half of a step, apart from the target's."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.drafting import DrafterRank, DraftInputs
from models.exchange import ExchangeShape
from models.rows import StepInputs
from models.state import SlotState
from models.steps import ModelRank
from tests.unit.models.conftest import PROMPT, PairMaker
from tests.unit.models.exchanges import load_drafting
from tests.unit.models.ranks import load_model_rank
from tests.unit.models.test_steps import OTHER_PROMPT, PAGE, Decode, Prefill, emitted, inputs


def draft_inputs(tokens: int, width: int, rows: int, block: int, seed: int) -> DraftInputs:
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> Tensor:
        return torch.randint(-9, 1 << 20, shape, generator=generator, dtype=torch.int32)

    return DraftInputs(
        aux=torch.randn(tokens, width, generator=generator),
        positions=ints(tokens),
        inject_slots=ints(tokens),
        slots=ints(rows),
        blocks=ints(rows, block),
        context_lens=ints(rows),
    )


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 9),
    rows=st.integers(0, 9),
    block=st.integers(2, 11),
    seed=st.integers(0, 99),
)
def test_what_was_packed_is_unpacked(
    tokens: int, width: int, rows: int, block: int, seed: int
) -> None:
    sent = draft_inputs(tokens, width, rows, block, seed)
    packed = sent.packed()
    assert packed.dtype == torch.int32
    assert packed.shape == (2 * tokens + rows * (block + 2),)
    assert packed.numel() == ExchangeShape.of(sent, 0).num_ints
    got = DraftInputs.unpack(sent.aux, packed, rows)
    for name, mine, theirs in zip(DraftInputs._fields, sent, got, strict=True):
        if rows or name != "blocks":
            assert torch.equal(mine, theirs), name
    assert got.blocks.numel() == sent.blocks.numel()


def script() -> list[StepInputs]:
    """Chunks, padding, rows that emit nothing, rows that propose nothing, blocks cut short."""
    first = Decode(0, len(PROMPT))
    return [
        inputs(prefill=[Prefill(0, PROMPT[:6], last=False)]),
        inputs(prefill=[Prefill(0, PROMPT[6:], 6), Prefill(1, OTHER_PROMPT[:2], last=False)]),
        inputs(prefill=[Prefill(1, OTHER_PROMPT[2:], 2)], padding=2),
        inputs([first], padding=1),
        inputs(padding=3),
        inputs([replace(first, position=60, num_drafts=0, propose=False)], width=1, num_drafts=2),
        inputs(prefill=[Prefill(2, PROMPT[::-1])], num_drafts=2),
        inputs([Decode(2, len(PROMPT), num_drafts=2), Decode(1, len(OTHER_PROMPT))]),
    ]


def drafter_pools(drafting: DrafterRank | None) -> list[Tensor]:
    assert drafting is not None
    return [pool for layer in drafting.kv for pool in (layer.k, layer.v)]


def state_of(rank: ModelRank) -> dict[str, Tensor]:
    return {field.name: getattr(rank.state, field.name) for field in fields(SlotState)}


@torch.inference_mode()
def test_a_drafter_elsewhere_does_what_one_beside_the_target_does(trained: PairMaker) -> None:
    pair = trained("qwen3")
    whole = load_model_rank(*pair, page_size=PAGE)
    target = replace(load_model_rank(*pair, page_size=PAGE), drafting=None)
    drafting = load_drafting(pair, page_size=PAGE)
    num_proposing = 0
    for step in script():
        expected = whole.step(step)
        result, left = target.verify(step)
        assert emitted(result) == emitted(expected)
        sent = left.packed().clone()
        got = DraftInputs.unpack(left.aux.clone(), sent, left.slots.shape[0])
        proposed = drafting.draft(got, step.num_drafts, step.context_pages)
        assert (proposed is None) == (step.num_drafts == 0)
        if proposed is not None:
            num_proposing += 1
            logits, drafts = proposed
            assert drafts.dtype == torch.int32
            assert drafts.shape == (step.emitting.shape[0], step.num_drafts)
            assert logits.shape[:2] == drafts.shape
            target.write_drafts(left.slots, drafts)
        for name, mine in state_of(target).items():
            assert torch.equal(mine, state_of(whole)[name]), name
        for mine, theirs in zip(
            drafter_pools(drafting), drafter_pools(whole.drafting), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert num_proposing > 4


@pytest.mark.parametrize("slots", [[0], [0, 1]])
@torch.inference_mode()
def test_dropped_drafts_are_not_verified(trained: PairMaker, slots: list[int]) -> None:
    rank = load_model_rank(*trained("qwen3"), page_size=PAGE)
    rank.step(inputs(prefill=[Prefill(0, PROMPT), Prefill(1, OTHER_PROMPT)]))
    rank.drop_drafts(torch.tensor(slots, dtype=torch.int32))
    result = rank.step(inputs([Decode(0, len(PROMPT)), Decode(1, len(OTHER_PROMPT))]))
    assert result.num_drafts.tolist() == [0 if slot in slots else 4 for slot in (0, 1)]
