"""One engine step on one rank: verify, accept, inject, propose. Nothing is read back in between.

Shapes come from the bucket alone. Padded rows carry the scratch slot and touch only the null page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import Grid, causal_grid
from models.dflash import DFlashDrafter
from models.kv_cache import LayerKV
from models.proposal import bonus_tokens, paged_slots, prev_rejected, query_blocks
from models.rejection import accept, count_valid
from models.sampler import greedy
from models.state import SlotState
from models.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """A plan as tensors, int32 unless noted; R decode rows, C prefill rows of T tokens.

    decode_slots, decode_positions (optimistic, of the bonus token), decode_num_drafts `[R]`;
    decode_in_flight, decode_propose, decode_valid `[R]` bool. prefill_slots, prefill_starts,
    prefill_counts `[C]`; prefill_tokens `[C, T]`; prefill_fresh, prefill_last, prefill_propose
    `[C]` bool. temperatures `[R + C]` float32 (0 is greedy) and seeds `[R + C, 2]` (low and high
    half of 64 bits) are each row's sampling parameters. `verify_width` is k + 1; every row
    reads `context_pages` KV pages.
    """

    verify_width: int
    context_pages: int
    decode_slots: Tensor
    decode_positions: Tensor
    decode_num_drafts: Tensor
    decode_in_flight: Tensor
    decode_propose: Tensor
    decode_valid: Tensor
    prefill_slots: Tensor
    prefill_starts: Tensor
    prefill_counts: Tensor
    prefill_tokens: Tensor
    prefill_fresh: Tensor
    prefill_last: Tensor
    prefill_propose: Tensor
    temperatures: Tensor
    seeds: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled [R + C, K + 1] int32`, -1 padded (all -1 for a row that emits nothing), and
    `num_drafts [R + C] int32`, the drafts each row really verified."""

    sampled: Tensor
    num_drafts: Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """The token rows of a step: both grids flattened, decode first."""

    tokens: Tensor  # [N] int32
    positions: Tensor  # [N] int32
    valid: Tensor  # [N] bool
    slots: Tensor  # [N] int32, cache slots
    drafts: Tensor  # [R, verify_width - 1] int32, -1 where none is verified
    decode_positions: Tensor  # [R] int32, corrected


@dataclass(frozen=True, slots=True)
class ModelRank:
    """Everything one rank computes with: the models, their KV pools and the slots' state.

    `target_kv` and `drafter_kv` are one pool list, target layers first, under one block table.
    """

    target: Target
    drafter: DFlashDrafter | None
    target_kv: Sequence[LayerKV]
    drafter_kv: Sequence[LayerKV]
    state: SlotState
    vocab_size: int

    def step(self, inputs: StepInputs) -> StepResult:
        """Run one step and leave what the next one needs in the slots' state."""
        state = self.state
        fresh = torch.where(inputs.prefill_fresh, inputs.prefill_slots, state.scratch_slot)
        state.reset(fresh)
        tables = torch.cat(
            [state.block_table[inputs.decode_slots], state.block_table[inputs.prefill_slots]]
        )[:, : inputs.context_pages]

        rows = self._place(inputs, tables)
        hidden, aux = self._run_target(inputs, rows, tables)
        chosen = greedy(self.target.logits(self._emitting(inputs, hidden)), self.target.lm_head)
        sampled, lengths = self._accept(inputs, rows, chosen)
        drafted = (rows.drafts >= 0).sum(1, dtype=torch.int32)
        num_drafts = torch.cat([drafted, torch.zeros_like(inputs.prefill_counts)])

        # Only rows that emit own their slot's state; other rows write to the scratch slot.
        emits = torch.cat([inputs.decode_valid, inputs.prefill_last])
        slots = torch.cat([inputs.decode_slots, inputs.prefill_slots])
        slots = torch.where(emits, slots, state.scratch_slot)
        state.sampled.index_put_((slots,), sampled)
        planned = torch.cat([inputs.decode_num_drafts, torch.zeros_like(inputs.prefill_counts)])
        state.planned.index_put_((slots,), planned)
        if self.drafter is not None:
            self._inject(inputs, rows, aux, sampled)
            propose = torch.cat([inputs.decode_propose, inputs.prefill_propose]) & emits
            drafts, count = self._propose(self.drafter, sampled, lengths, propose, tables)
            state.drafts.index_put_((slots,), drafts)
            state.num_drafts.index_put_((slots,), count)
        return StepResult(sampled, num_drafts)

    def _place(self, inputs: StepInputs, tables: Tensor) -> _Rows:
        """Tokens, true positions and cache slots of every token row."""
        state, num_drafts = self.state, inputs.verify_width - 1
        slots = inputs.decode_slots
        sampled = state.sampled[slots]
        rejected = prev_rejected(
            sampled, state.planned[slots], inputs.decode_in_flight, self.vocab_size
        )
        position = inputs.decode_positions - rejected
        bonus = bonus_tokens(sampled, self.vocab_size)
        available = torch.minimum(inputs.decode_num_drafts, state.num_drafts[slots])
        index = torch.arange(num_drafts, dtype=torch.int32, device=slots.device)
        drafts = torch.where(
            index < available.unsqueeze(1), state.drafts[slots][:, :num_drafts], -1
        )
        tokens = torch.cat([bonus.unsqueeze(1), drafts], dim=1)
        width = torch.arange(inputs.verify_width, dtype=torch.int32, device=slots.device)
        decode_positions = position.unsqueeze(1) + width
        # A decode row's padding sits at its own bonus position: in range for every table.
        decode_valid = (tokens >= 0) & inputs.decode_valid.unsqueeze(1)
        decode_positions = torch.where(decode_valid, decode_positions, position.unsqueeze(1))

        length = inputs.prefill_tokens.shape[1]
        index = torch.arange(length, dtype=torch.int32, device=slots.device)
        prefill_valid = index < inputs.prefill_counts.unsqueeze(1)
        prefill_positions = inputs.prefill_starts.unsqueeze(1) + torch.where(
            prefill_valid, index, 0
        )
        page_size = self.target_kv[0].page_size
        decode_table, prefill_table = tables.split([slots.shape[0], inputs.prefill_slots.shape[0]])
        return _Rows(
            tokens=torch.cat([tokens.clamp(min=0).flatten(), inputs.prefill_tokens.flatten()]),
            positions=torch.cat([decode_positions.flatten(), prefill_positions.flatten()]),
            valid=torch.cat([decode_valid.flatten(), prefill_valid.flatten()]),
            slots=torch.cat(
                [
                    paged_slots(decode_positions, decode_table, decode_valid, page_size).flatten(),
                    paged_slots(
                        prefill_positions, prefill_table, prefill_valid, page_size
                    ).flatten(),
                ]
            ),
            drafts=drafts,
            decode_positions=position,
        )

    def _run_target(self, inputs: StepInputs, rows: _Rows, tables: Tensor) -> tuple[Tensor, Tensor]:
        page_size = self.target_kv[0].page_size
        num_decode = inputs.decode_slots.shape[0]
        num_decode_tokens = num_decode * inputs.verify_width
        grids: list[Grid] = []
        if num_decode:
            positions = rows.positions[:num_decode_tokens].view(num_decode, -1)
            grids.append(causal_grid(tables[:num_decode], positions, page_size))
        if inputs.prefill_slots.shape[0]:
            positions = rows.positions[num_decode_tokens:].view(inputs.prefill_tokens.shape)
            grids.append(causal_grid(tables[num_decode:], positions, page_size))
        hidden, aux = self.target(rows.tokens, rows.positions, rows.slots, grids, self.target_kv)
        return hidden, aux

    def _emitting(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """The token rows whose logits are needed: all of decode, the last of each prefill row."""
        num_decode_tokens = inputs.decode_slots.shape[0] * inputs.verify_width
        rows, width = inputs.prefill_tokens.shape
        first = torch.arange(rows, dtype=torch.int32, device=hidden.device) * width
        last = num_decode_tokens + first + (inputs.prefill_counts - 1).clamp(min=0)
        return torch.cat([hidden[:num_decode_tokens], hidden[last]])

    def _accept(self, inputs: StepInputs, rows: _Rows, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """What each row emits `[R + C, K + 1]`, and its length afterwards `[R + C]`: the number of
        tokens fed and kept, which is also the position of its new bonus token."""
        num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
        target_ids = chosen[: num_decode * width].view(num_decode, width)
        emitted = accept(target_ids, rows.drafts)
        emitted = torch.where(inputs.decode_valid.unsqueeze(1), emitted, -1)
        decode_lens = rows.decode_positions + count_valid(emitted, self.vocab_size)

        first = torch.where(inputs.prefill_last, chosen[num_decode * width :], -1).unsqueeze(1)
        prefill_lens = inputs.prefill_starts + inputs.prefill_counts
        full = self.state.sampled.shape[1]
        pad = torch.nn.functional.pad
        sampled = torch.cat(
            [pad(emitted, (0, full - width), value=-1), pad(first, (0, full - 1), value=-1)]
        )
        return sampled, torch.cat([decode_lens, prefill_lens])

    def _inject(self, inputs: StepInputs, rows: _Rows, aux: Tensor, sampled: Tensor) -> None:
        """Give the drafter the states of surviving tokens; rejected ones go to the null page."""
        assert self.drafter is not None
        num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
        # Token i of a decode row survives with the i-th emitted token: x_i stands behind it.
        survives = (sampled[:num_decode, :width] >= 0).flatten()
        alive = rows.valid.clone()
        alive[: num_decode * width] &= survives
        page_size = self.target_kv[0].page_size
        slots = torch.where(alive, rows.slots, rows.positions % page_size)
        self.drafter.inject(aux, rows.positions, slots, self.drafter_kv)

    def _propose(
        self,
        drafter: DFlashDrafter,
        sampled: Tensor,
        lengths: Tensor,
        propose: Tensor,
        tables: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Drafts `[rows, K]` behind each row's new bonus token, and how many there are `[rows]`."""
        bonus = bonus_tokens(sampled, self.vocab_size)
        config = drafter.config
        blocks = query_blocks(bonus, config.num_drafts, config.mask_token_id)
        hidden = drafter.block_hidden(blocks, lengths, tables, self.drafter_kv)
        drafts = drafter.draft_tokens(hidden)
        count = torch.where(propose & (bonus >= 0), config.num_drafts, 0).to(torch.int32)
        return drafts, count
