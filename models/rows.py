"""Where the token rows of a step come from, and what its emitting rows give.

Integer arithmetic around the models, all on the device: a step needs nothing from the host once it
is submitted. Shapes come from the bucket alone; padded rows carry the scratch slot and touch only
the null page.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import DrafterConfig
from models.ops import Context, Grid, Ops
from models.proposal import bonus_tokens, paged_slots, prev_rejected, query_blocks
from models.rejection import accept, count_valid
from models.state import SlotState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """A plan as tensors, int32 unless noted; R decode rows, C prefill rows of T tokens, of which D
    rows emit.

    decode_slots, decode_positions (optimistic, of the bonus token), decode_num_drafts `[R]`;
    decode_in_flight, decode_valid `[R]` bool. prefill_slots, prefill_starts, prefill_counts
    `[C]`; prefill_tokens `[C, T]`; prefill_next `[C]` (the token behind each row, -1 where none is
    known); prefill_fresh `[C]` bool. emitting `[D]` is where each emitting row stands among the
    R + C rows: the valid decode rows in order, then prefill rows that end their prompt, then -1;
    proposed `[D]` how many drafts it proposes. D may be 0. `verify_width` is k + 1; at most
    `num_drafts` are proposed, 0 leaves the drafter out. There are `num_tokens` token rows with
    their padding; every row reads `context_pages` KV pages. `choosing`, `num_logprobs` and
    `num_prompt_logprobs` as in `actors.messages.Bucket`. In a guided step `masks`, bit `i % 32` of
    word `i // 32` for token `i`, say what may stand behind each row of `deciding` that is `masked`.
    """

    verify_width: int
    num_drafts: int
    num_tokens: int
    context_pages: int
    choosing: Literal["greedy", "sampled", "shaped"]
    num_logprobs: int
    num_prompt_logprobs: int
    decode_slots: Tensor
    decode_positions: Tensor
    decode_num_drafts: Tensor
    decode_in_flight: Tensor
    decode_valid: Tensor
    prefill_slots: Tensor
    prefill_starts: Tensor
    prefill_counts: Tensor
    prefill_tokens: Tensor
    prefill_next: Tensor
    prefill_fresh: Tensor
    emitting: Tensor
    proposed: Tensor
    masks: Tensor | None = None  # [rows of deciding, ceil(vocabulary / 32)]
    masked: Tensor | None = None  # [rows of deciding] bool


class TokenRows(NamedTuple):
    """The N token rows of a step: both grids flattened, decode first, then padding."""

    tokens: Tensor  # [N] int32
    positions: Tensor  # [N] int32
    valid: Tensor  # [N] bool
    cache_slots: Tensor  # [N] int32
    context: Context  # for the target's attention
    drafts: Tensor  # [R, verify_width - 1] int32, -1 where none is verified
    decode_positions: Tensor  # [R] int32, corrected


class Emitted(NamedTuple):
    """What the D emitting rows of a step gave, and where the drafter goes on from there."""

    slots: Tensor  # [D] int32, the scratch slot for padding
    sampled: Tensor  # [D, K + 1] int32, -1 padded
    num_drafts: Tensor  # [D] int32: drafts verified
    inject_slots: Tensor  # [N] int32: cache slots, rejected and padded tokens on the null page
    blocks: Tensor  # [D, K + 1] int32: query blocks
    context_lens: Tensor  # [D] int32: tokens fed and kept, the position of the new bonus token


def place(
    inputs: StepInputs, state: SlotState, ops: Ops, page_size: int, vocab_size: int
) -> TokenRows:
    """Tokens, true positions and cache slots of every token row."""
    num_drafts = inputs.verify_width - 1
    slots = inputs.decode_slots
    sampled = state.sampled[slots]
    rejected = prev_rejected(sampled, state.planned[slots], inputs.decode_in_flight, vocab_size)
    position = inputs.decode_positions - rejected
    bonus = bonus_tokens(sampled, vocab_size)
    available = torch.minimum(inputs.decode_num_drafts, state.num_drafts[slots])
    index = torch.arange(num_drafts, dtype=torch.int32, device=slots.device)
    drafts = torch.where(index < available.unsqueeze(1), state.drafts[slots][:, :num_drafts], -1)
    tokens = torch.cat([bonus.unsqueeze(1), drafts], dim=1)
    width = torch.arange(inputs.verify_width, dtype=torch.int32, device=slots.device)
    # A decode row's padding sits at its own bonus position: in range for every table.
    valid = (tokens >= 0) & inputs.decode_valid.unsqueeze(1)
    positions = position.unsqueeze(1) + torch.where(valid, width, 0)
    grids = [Grid(slots, positions, valid)]
    parts = [tokens.clamp(min=0)]

    length = inputs.prefill_tokens.shape[1]
    index = torch.arange(length, dtype=torch.int32, device=slots.device)
    valid = index < inputs.prefill_counts.unsqueeze(1)
    positions = inputs.prefill_starts.unsqueeze(1) + torch.where(valid, index, 0)
    grids.append(Grid(inputs.prefill_slots, positions, valid))
    parts.append(inputs.prefill_tokens)
    size = sum(part.numel() for part in parts)

    def flat(tensors: list[Tensor]) -> Tensor:
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(joined, (0, inputs.num_tokens - size))

    return TokenRows(
        tokens=flat(parts),
        positions=flat([grid.positions for grid in grids]),
        valid=flat([grid.valid for grid in grids]),
        cache_slots=flat(
            [
                paged_slots(grid.positions, state.block_table[grid.slots], grid.valid, page_size)
                for grid in grids
            ]
        ),
        context=ops.causal_context(
            state.block_table,
            [grid for grid in grids if grid.positions.numel()],
            page_size,
            inputs.context_pages,
            inputs.num_tokens,
        ),
        drafts=drafts,
        decode_positions=position,
    )


def deciding(inputs: StepInputs, hidden: Tensor) -> Tensor:
    """Of something about each token row, `[N, ...]`, that of the rows whose logits are needed: all
    of decode `[R * verify_width]`, then, in a step with prefill, the last token of each emitting
    row `[D]` (unused for decode rows)."""
    num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
    decode = hidden[: num_decode * width]
    num_prefill, length = inputs.prefill_tokens.shape
    if num_prefill == 0:
        return decode
    row = (inputs.emitting - num_decode).clamp(min=0)
    last = (inputs.prefill_counts[row] - 1).clamp(min=0)
    return torch.cat([decode, hidden[num_decode * width + row * length + last]])


def emit(
    inputs: StepInputs,
    rows: TokenRows,
    chosen: Tensor,
    state: SlotState,
    page_size: int,
    vocab_size: int,
    drafter: DrafterConfig | None,
) -> Emitted:
    """What each row emits, from the target's choice behind every token of `deciding`; the slots'
    state but for their drafts is brought up to it."""
    num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
    full = state.sampled.shape[1]
    accepted = accept(chosen[: num_decode * width].view(num_decode, width), rows.drafts)
    accepted = torch.where(inputs.decode_valid.unsqueeze(1), accepted, -1)
    lengths = rows.decode_positions + count_valid(accepted, vocab_size)
    drafted = (rows.drafts >= 0).sum(1, dtype=torch.int32)
    planned = inputs.decode_num_drafts
    sampled = F.pad(accepted, (0, full - width), value=-1)
    # Token i of a decode row survives with the i-th emitted token: x_i stands behind it.
    survives = (accepted >= 0).flatten()
    alive = rows.valid & torch.cat([survives, survives.new_ones(inputs.num_tokens - len(survives))])

    valid, row = inputs.emitting >= 0, inputs.emitting.clamp(min=0)
    slots = torch.cat([inputs.decode_slots, inputs.prefill_slots])[row]
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
    sampled = torch.where(valid.unsqueeze(1), sampled, -1)
    slots = torch.where(valid, slots, state.scratch_slot)
    state.sampled.index_put_((slots,), sampled)
    state.planned.index_put_((slots,), torch.where(valid, planned[row], 0))
    bonus = bonus_tokens(sampled, vocab_size)
    proposed = torch.where(bonus >= 0, inputs.proposed, 0)
    block_drafts, mask_token_id = 0, 0
    if drafter is not None:
        block_drafts, mask_token_id = drafter.num_drafts, drafter.mask_token_id
        state.num_drafts.index_put_((slots,), proposed)
    return Emitted(
        slots=slots,
        sampled=sampled,
        num_drafts=torch.where(valid, drafted[row], 0),
        inject_slots=torch.where(alive, rows.cache_slots, rows.positions % page_size),
        blocks=query_blocks(bonus, block_drafts, mask_token_id),
        # A row that does not propose sees no context; its drafts are not used.
        context_lens=torch.where(proposed > 0, lengths[row], 0),
    )
