"""One engine step on one rank: verify, accept, inject, propose. Nothing is read back in between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.choosing import TokenScores, choose, emitted_scores, prompt_scores
from models.dflash import DFlashDrafter
from models.kv_cache import LayerKV
from models.rows import Emitted, StepInputs, TokenRows, deciding, emit, place
from models.slot_sampling import SamplingState
from models.state import SlotState
from models.target import RunLayers, Target, run_layers


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the emitting rows in order: `sampled [D, K + 1] int32`, padded with -1 (all -1 for a
    padded row), and `num_drafts [D] int32`, the drafts each row really verified. `logprobs` of
    the first tokens of each row, and `prompt_logprobs` of the prefill grid, if asked for; `drafts
    [D, n] int32`, the proposed ones, in a guided step."""

    sampled: Tensor
    num_drafts: Tensor
    logprobs: TokenScores | None
    prompt_logprobs: TokenScores | None
    drafts: Tensor | None


class Regions(NamedTuple):
    """The parts of a step as a backend compiled them.

    The shapes of `run_layers`, `inject` and `block_hidden` are those of a bucket's token rows and
    emitting rows, so that few forms serve many buckets. `place` and `emit` depend on the whole
    bucket and run compiled only where a step has no prefill: a prefill's time is not in them.
    """

    run_layers: RunLayers
    place: Callable[..., TokenRows]
    emit: Callable[..., Emitted]
    inject: Callable[..., None] | None
    block_hidden: Callable[..., Tensor] | None

    @classmethod
    def of(
        cls,
        drafter: DFlashDrafter | None,
        compiled: Callable[[Callable[..., object]], Callable[..., object]] = lambda region: region,
    ) -> "Regions":
        """Every region through `compiled`; as it is by default."""
        regions = (run_layers, place, emit)
        drafting = (drafter.inject, drafter.block_hidden) if drafter else (None, None)
        return cls(
            *(compiled(region) for region in regions),  # type: ignore[arg-type]
            *(compiled(region) if region else None for region in drafting),
        )


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
    sampling: SamplingState
    vocab_size: int

    def step(self, inputs: StepInputs, captured: dict[str, Tensor] | None = None) -> StepResult:
        """Run one step and leave what the next one needs in the slots' state.

        `captured`, where it is given, gets this rank's `target_logits [rows of deciding, V]`,
        `draft_logits [D, n, V]` of the n proposed drafts, and the emitting rows' `slots` and
        `sampled`.
        """
        state, ops, page_size = self.state, self.target.ops, self.target_kv[0].page_size
        place_rows, emit_rows = self.regions.place, self.regions.emit
        if inputs.prefill_slots.shape[0]:
            place_rows, emit_rows = place, emit
            fresh = torch.where(inputs.prefill_fresh, inputs.prefill_slots, state.scratch_slot)
            state.reset(fresh)
        rows = place_rows(inputs, state, ops, page_size, self.vocab_size)
        hidden, aux = self.target(
            rows.tokens,
            rows.positions,
            rows.cache_slots,
            rows.context,
            self.target_kv,
            self.regions.run_layers,
        )
        head = self.target.lm_head
        logits = self.target.logits(deciding(inputs, hidden))
        max_context = inputs.context_pages * page_size
        chosen = choose(inputs, rows, logits, self.sampling, max_context, head)
        logprobs = emitted_scores(inputs, logits, chosen, head)
        config = self.drafter.config if self.drafter else None
        emitted = emit_rows(inputs, rows, chosen, state, page_size, self.vocab_size, config)
        if self.regions.inject is not None:
            self.regions.inject(aux, rows.positions, emitted.inject_slots, self.drafter_kv)
        if captured is not None:
            captured |= {"target_logits": logits, "slots": emitted.slots}
            captured |= {"sampled": emitted.sampled}
        if self.drafter is not None and inputs.num_drafts:
            logits = self._propose(self.drafter, inputs, emitted, page_size)
            if captured is not None:
                captured["draft_logits"] = logits
        prompt_logprobs = prompt_scores(inputs, hidden, head)
        drafts = None
        if inputs.masks is not None:
            drafts = state.drafts[emitted.slots, : inputs.num_drafts]
        return StepResult(emitted.sampled, emitted.num_drafts, logprobs, prompt_logprobs, drafts)

    def _propose(
        self, drafter: DFlashDrafter, inputs: StepInputs, emitted: Emitted, page_size: int
    ) -> Tensor:
        """Draft a block behind each row's new bonus token; returns the logits `[D, n, V]` of its
        first `n = inputs.num_drafts` drafts."""
        assert self.regions.block_hidden is not None
        context = drafter.ops.block_context(
            self.state.block_table,
            emitted.slots,
            emitted.context_lens,
            drafter.config.block_size,
            page_size,
            inputs.context_pages,
        )
        hidden = self.regions.block_hidden(
            emitted.blocks, emitted.context_lens, context, self.drafter_kv
        )
        logits = drafter.draft_logits(hidden, inputs.num_drafts)
        drafts = self.state.drafts[:, : inputs.num_drafts]
        drafts.index_put_((emitted.slots,), drafter.draft_tokens(logits))
        return logits
