"""One engine step on one rank: verify, accept, inject, propose. Nothing is read back in between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from models.choosing import TokenScores, choose, emitted_scores, prompt_scores
from models.config import DrafterConfig
from models.drafting import DrafterRank, DraftInputs
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
    drafts: Tensor | None = None


class Regions(NamedTuple):
    """The target's parts of a step as a backend compiled them; `DrafterRank` has the drafter's.

    The shapes of `run_layers` are those of a bucket's token rows, so that few forms serve many
    buckets. `place` and `emit` depend on the whole bucket and run compiled only where a step has no
    prefill: a prefill's time is not in them.
    """

    run_layers: RunLayers
    place: Callable[..., TokenRows]
    emit: Callable[..., Emitted]

    @classmethod
    def of(
        cls,
        compiled: Callable[[Callable[..., object]], Callable[..., object]] = lambda region: region,
    ) -> "Regions":
        """Every region through `compiled`; as it is by default."""
        return cls(*(compiled(region) for region in (run_layers, place, emit)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelRank:
    """Everything one rank of the target computes with: the model, its KV pools, the slots' state,
    and its part of a drafter, if that is here.

    `drafter_config` is that of the drafter, here or elsewhere, whose blocks a step prepares; None
    without speculation.
    """

    target: Target
    regions: Regions
    target_kv: Sequence[LayerKV]
    state: SlotState
    sampling: SamplingState
    vocab_size: int
    drafter_config: DrafterConfig | None = None
    drafting: DrafterRank | None = None

    def step(self, inputs: StepInputs, captured: dict[str, Tensor] | None = None) -> StepResult:
        """Run one step and leave what the next one needs in the slots' state.

        `captured`, where it is given, gets this rank's `target_logits [rows of deciding, V]`,
        `draft_logits [D, n, V]` of the n proposed drafts, and the emitting rows' `slots` and
        `sampled`.
        """
        result, draft_inputs = self.verify(inputs, captured)
        if self.drafting is None:
            return result
        proposed = self.drafting.draft(draft_inputs, inputs.num_drafts, inputs.context_pages)
        if proposed is None:
            return result
        logits, drafts = proposed
        self.write_drafts(draft_inputs.slots, drafts)
        if captured is not None:
            captured["draft_logits"] = logits
        return replace(result, drafts=drafts) if inputs.masks is not None else result

    def verify(
        self, inputs: StepInputs, captured: dict[str, Tensor] | None = None
    ) -> tuple[StepResult, DraftInputs]:
        """The target's half of `step`, without the drafts that rows propose."""
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
        emitted = emit_rows(
            inputs, rows, chosen, state, page_size, self.vocab_size, self.drafter_config
        )
        if captured is not None:
            captured |= {"target_logits": logits, "slots": emitted.slots}
            captured |= {"sampled": emitted.sampled}
        prompt_logprobs = prompt_scores(inputs, hidden, head)
        result = StepResult(emitted.sampled, emitted.num_drafts, logprobs, prompt_logprobs)
        return result, DraftInputs(
            aux=aux,
            positions=rows.positions,
            inject_slots=emitted.inject_slots,
            slots=emitted.slots,
            blocks=emitted.blocks,
            context_lens=emitted.context_lens,
        )

    def write_drafts(self, slots: Tensor, drafts: Tensor, num_drafts: Tensor | None = None) -> None:
        """Give the slots `[D] int32` the drafts `[D, n] int32` that their next rows verify, and
        `num_drafts [D] int32` of them, unless `verify` has said how many."""
        self.state.drafts[:, : drafts.shape[1]].index_put_((slots,), drafts)
        if num_drafts is not None:
            self.state.num_drafts.index_put_((slots,), num_drafts)

    def drop_drafts(self, slots: Tensor) -> None:
        """Let the next rows of the slots `[D] int32` verify none."""
        self.state.num_drafts.index_fill_(0, slots.long(), 0)
