"""One engine step on one rank: verify, accept, inject, propose. Nothing is read back in between.

Shapes come from the bucket alone. Padded rows carry the scratch slot and touch only the null page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.dflash import DFlashDrafter
from models.kv_cache import LayerKV
from models.ops import Grid
from models.proposal import bonus_tokens, paged_slots, prev_rejected, query_blocks
from models.rejection import accept, count_valid
from models.sampler import greedy
from models.state import SlotState
from models.target import RunLayers, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """A plan as tensors, int32 unless noted; R decode rows, C prefill rows of T tokens, of which D
    rows emit.

    decode_slots, decode_positions (optimistic, of the bonus token), decode_num_drafts `[R]`;
    decode_in_flight, decode_valid `[R]` bool. prefill_slots, prefill_starts, prefill_counts
    `[C]`; prefill_tokens `[C, T]`; prefill_fresh `[C]` bool. emitting `[D]` is where each emitting
    row stands among the R + C rows: the valid decode rows in order, then prefill rows that end
    their prompt, then -1. propose `[D]` bool, temperatures `[D]` float32 (0 is greedy) and seeds
    `[D, 2]` (low and high half of 64 bits) belong to emitting rows; D may be 0.
    `verify_width` is k + 1; there are `num_tokens` token rows with their padding; every row reads
    `context_pages` KV pages.
    """

    verify_width: int
    num_tokens: int
    context_pages: int
    decode_slots: Tensor
    decode_positions: Tensor
    decode_num_drafts: Tensor
    decode_in_flight: Tensor
    decode_valid: Tensor
    prefill_slots: Tensor
    prefill_starts: Tensor
    prefill_counts: Tensor
    prefill_tokens: Tensor
    prefill_fresh: Tensor
    emitting: Tensor
    propose: Tensor
    temperatures: Tensor
    seeds: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the emitting rows in order: `sampled [D, K + 1] int32`, padded with -1 (all -1 for a
    padded row), and `num_drafts [D] int32`, the drafts each row really verified."""

    sampled: Tensor
    num_drafts: Tensor


class Regions(NamedTuple):
    """The heavy parts of a step, which a backend may have compiled: `Target.forward`,
    `DFlashDrafter.inject` and `DFlashDrafter.block_hidden`. Their shapes are those of a bucket's
    token rows and emitting rows, so that few are needed for many buckets."""

    run_layers: RunLayers
    inject: Callable[..., None] | None = None
    block_hidden: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The token rows of a step: both grids flattened, decode first, then padding."""

    tokens: Tensor  # [N] int32
    positions: Tensor  # [N] int32
    valid: Tensor  # [N] bool
    slots: Tensor  # [N] int32, cache slots
    grids: list[Grid]
    drafts: Tensor  # [R, verify_width - 1] int32, -1 where none is verified
    decode_positions: Tensor  # [R] int32, corrected


@dataclass(frozen=True, slots=True)
class _Emitted:
    """What the emitting rows of a step gave."""

    slots: Tensor  # [D] int32, the scratch slot for padding
    sampled: Tensor  # [D, K + 1] int32
    lengths: Tensor  # [D] int32: tokens fed and kept, the position of the new bonus token
    planned: Tensor  # [D] int32: drafts the plan asked to verify
    num_drafts: Tensor  # [D] int32: drafts verified
    survivors: Tensor  # [R, verify_width] bool: decode tokens that stay in the sequence


@dataclass(frozen=True, slots=True)
class ModelRank:
    """Everything one rank computes with: the models, their KV pools and the slots' state.

    `target_kv` and `drafter_kv` are one pool list, target layers first, under one block table.
    """

    target: Target
    drafter: DFlashDrafter | None
    regions: Regions
    target_kv: Sequence[LayerKV]
    drafter_kv: Sequence[LayerKV]
    state: SlotState
    vocab_size: int

    @property
    def page_size(self) -> int:
        return self.target_kv[0].page_size

    def step(self, inputs: StepInputs) -> StepResult:
        """Run one step and leave what the next one needs in the slots' state."""
        state = self.state
        fresh = torch.where(inputs.prefill_fresh, inputs.prefill_slots, state.scratch_slot)
        state.reset(fresh)
        rows = self._place(inputs)
        context = self.target.ops.causal_context(
            state.block_table, rows.grids, self.page_size, inputs.context_pages, inputs.num_tokens
        )
        hidden, aux = self.target(
            rows.tokens,
            rows.positions,
            rows.slots,
            context,
            self.target_kv,
            self.regions.run_layers,
        )
        logits = self.target.logits(self._deciding(inputs, hidden))
        emitted = self._accept(inputs, rows, greedy(logits, self.target.lm_head))
        state.sampled.index_put_((emitted.slots,), emitted.sampled)
        state.planned.index_put_((emitted.slots,), emitted.planned)
        if self.drafter is not None:
            self._inject(inputs, rows, aux, emitted.survivors)
        if self.drafter is not None and len(inputs.emitting):
            drafts, count = self._propose(self.drafter, inputs, emitted)
            state.drafts.index_put_((emitted.slots,), drafts)
            state.num_drafts.index_put_((emitted.slots,), count)
        return StepResult(emitted.sampled, emitted.num_drafts)

    def _place(self, inputs: StepInputs) -> _Rows:
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
        grids = [
            Grid(slots, decode_positions, decode_valid),
            Grid(inputs.prefill_slots, prefill_positions, prefill_valid),
        ]
        cache_slots = [
            paged_slots(grid.positions, state.block_table[grid.slots], grid.valid, self.page_size)
            for grid in grids
        ]

        def flat(decode: Tensor, prefill: Tensor) -> Tensor:
            size = decode.numel() + prefill.numel()
            parts = torch.cat([decode.flatten(), prefill.flatten()])
            return F.pad(parts, (0, inputs.num_tokens - size))

        return _Rows(
            tokens=flat(tokens.clamp(min=0), inputs.prefill_tokens),
            positions=flat(decode_positions, prefill_positions),
            valid=flat(decode_valid, prefill_valid),
            slots=flat(*cache_slots),
            grids=[grid for grid in grids if grid.positions.numel()],
            drafts=drafts,
            decode_positions=position,
        )

    def _deciding(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """The token rows whose logits are needed: all of decode `[R * verify_width]`, then, in a
        step with prefill, the last token of each emitting row `[D]` (unused for decode rows)."""
        num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
        decode = hidden[: num_decode * width]
        num_prefill, length = inputs.prefill_tokens.shape
        if num_prefill == 0:
            return decode
        row = (inputs.emitting - num_decode).clamp(min=0)
        last = (inputs.prefill_counts[row] - 1).clamp(min=0)
        return torch.cat([decode, hidden[num_decode * width + row * length + last]])

    def _accept(self, inputs: StepInputs, rows: _Rows, chosen: Tensor) -> _Emitted:
        """What each row emits, from the target's choice behind every token of `_deciding`."""
        num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
        full = self.state.sampled.shape[1]
        accepted = accept(chosen[: num_decode * width].view(num_decode, width), rows.drafts)
        accepted = torch.where(inputs.decode_valid.unsqueeze(1), accepted, -1)
        lengths = rows.decode_positions + count_valid(accepted, self.vocab_size)
        drafted = (rows.drafts >= 0).sum(1, dtype=torch.int32)
        sampled = F.pad(accepted, (0, full - width), value=-1)

        emits, row = inputs.emitting >= 0, inputs.emitting.clamp(min=0)
        slots = torch.cat([inputs.decode_slots, inputs.prefill_slots])[row]
        planned = inputs.decode_num_drafts
        if num_prefill := inputs.prefill_slots.shape[0]:
            # Rows of the prefill grid stand behind those of the decode grid.
            zeros = torch.zeros_like(inputs.prefill_counts)
            lengths = torch.cat([lengths, inputs.prefill_starts + inputs.prefill_counts])
            drafted, planned = torch.cat([drafted, zeros]), torch.cat([planned, zeros])
            sampled = F.pad(sampled, (0, 0, 0, num_prefill), value=-1)
            first = F.pad(chosen[num_decode * width :].unsqueeze(1), (0, full - 1), value=-1)
            sampled = torch.where((row >= num_decode).unsqueeze(1), first, sampled[row])
        else:
            sampled = sampled[row]
        return _Emitted(
            slots=torch.where(emits, slots, self.state.scratch_slot),
            sampled=torch.where(emits.unsqueeze(1), sampled, -1),
            lengths=torch.where(emits, lengths[row], 0),
            planned=torch.where(emits, planned[row], 0),
            num_drafts=torch.where(emits, drafted[row], 0),
            # Token i of a decode row survives with the i-th emitted token: x_i stands behind it.
            survivors=accepted >= 0,
        )

    def _inject(self, inputs: StepInputs, rows: _Rows, aux: Tensor, survivors: Tensor) -> None:
        """Give the drafter the states of surviving tokens; rejected ones go to the null page."""
        assert self.regions.inject is not None
        num_decode = survivors.numel()
        alive = rows.valid & torch.cat(
            [survivors.flatten(), rows.valid.new_ones(inputs.num_tokens - num_decode)]
        )
        slots = torch.where(alive, rows.slots, rows.positions % self.page_size)
        self.regions.inject(aux, rows.positions, slots, self.drafter_kv)

    def _propose(
        self, drafter: DFlashDrafter, inputs: StepInputs, emitted: _Emitted
    ) -> tuple[Tensor, Tensor]:
        """Drafts `[D, K]` behind each row's new bonus token, and how many there are `[D]`."""
        assert self.regions.block_hidden is not None
        config = drafter.config
        bonus = bonus_tokens(emitted.sampled, self.vocab_size)
        proposes = inputs.propose & (bonus >= 0)
        lengths = torch.where(proposes, emitted.lengths, 0)
        context = drafter.ops.block_context(
            self.state.block_table,
            emitted.slots,
            lengths,
            config.block_size,
            self.page_size,
            inputs.context_pages,
        )
        blocks = query_blocks(bonus, config.num_drafts, config.mask_token_id)
        hidden = self.regions.block_hidden(blocks, lengths, context, self.drafter_kv)
        count = torch.where(proposes, config.num_drafts, 0).to(torch.int32)
        return drafter.draft_tokens(hidden), count
