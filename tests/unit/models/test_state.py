"""Slots: their shapes, and what a reset forgets."""

from dataclasses import fields

import torch

from models.state import SlotState


def test_fresh_state_is_empty_with_a_row_to_spare() -> None:
    state = SlotState.allocate(num_slots=3, num_drafts=4, num_pages=5)
    assert state.scratch_slot == 3
    assert {field.name: tuple(getattr(state, field.name).shape) for field in fields(state)} == {
        "sampled": (4, 5),
        "planned": (4,),
        "drafts": (4, 4),
        "num_drafts": (4,),
        "block_table": (4, 5),
    }
    assert all(getattr(state, field.name).dtype == torch.int32 for field in fields(state))
    assert (state.sampled == -1).all()
    assert (state.drafts == -1).all()
    assert not state.planned.any()
    assert not state.num_drafts.any()
    assert not state.block_table.any()


def test_without_speculation_a_slot_keeps_one_token() -> None:
    state = SlotState.allocate(num_slots=2, num_drafts=0, num_pages=1)
    assert state.sampled.shape == (3, 1)
    assert state.drafts.shape == (3, 0)


def test_reset_forgets_the_named_slots_only() -> None:
    state = SlotState.allocate(num_slots=3, num_drafts=2, num_pages=2)
    for tensor in (state.sampled, state.planned, state.drafts, state.num_drafts):
        tensor.fill_(2)
    state.block_table.fill_(7)
    state.reset(torch.tensor([1, 3, 1], dtype=torch.int32))
    assert state.sampled.tolist() == [[2] * 3, [-1] * 3, [2] * 3, [-1] * 3]
    assert state.planned.tolist() == [2, 0, 2, 0]
    assert state.num_drafts.tolist() == [2, 0, 2, 0]
    assert (state.block_table == 7).all(), "pages are given before the first row runs"
