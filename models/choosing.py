"""What the target chooses behind the rows of a step, and how probable it finds tokens there.

Plain torch around the kernels, never compiled: a step that asks for any of this takes a few calls
more, and one that doesn't takes none.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import LMHead
from models.logits import constrain
from models.rows import StepInputs, TokenRows, deciding
from models.sampler import greedy
from models.sampling import log_probs, sample
from models.slot_sampling import SamplingState

# Prefill rows whose logits exist at once: of a whole chunk, they would be as large as a model.
_PROMPT_ROWS = 32


class TokenScores(NamedTuple):
    """Log-probabilities before any sampling parameter acts, as `models.sampling.log_probs` gives
    them, of tokens `[rows, tokens]` and of the `n` most probable ones in their places."""

    logprobs: Tensor  # [rows, tokens] float32
    ranks: Tensor  # [rows, tokens] int32
    top_ids: Tensor  # [rows, tokens, n] int32
    top_logprobs: Tensor  # [rows, tokens, n] float32


def choose(
    inputs: StepInputs,
    rows: TokenRows,
    logits: Tensor,
    state: SamplingState,
    max_context: int,
    head: LMHead,
) -> Tensor:
    """A token behind each row of `deciding`, from its `logits [rows, local vocabulary]`: `[rows]
    int32`. Row i of a decode row is sampled as if its drafts up to the i-th were output; requests
    have fed at most `max_context` tokens.
    """
    if inputs.choosing == "greedy":
        return greedy(_guided(inputs, logits, logits, head), head)
    slots = _token_slots(inputs, scratch_slot=len(state.history) - 1)
    if inputs.choosing == "shaped":
        fed = torch.where(rows.valid, slots, len(state.history) - 1)
        state.feed(rows.tokens, fed, rows.positions)
    slots, positions = deciding(inputs, slots), deciding(inputs, rows.positions) + 1
    shaped = logits
    if inputs.choosing == "shaped":
        shaped = state.shape(logits, slots, positions, max_context, head)
    return sample(_guided(inputs, shaped, logits, head), state.rows(slots, positions), head)


def emitted_scores(
    inputs: StepInputs, logits: Tensor, chosen: Tensor, head: LMHead
) -> TokenScores | None:
    """Of what the D emitting rows may emit: `[D, verify_width]`, of which a row's first tokens
    count. None where the step asks for none."""
    if inputs.num_logprobs < 0:
        return None
    num_decode, width = inputs.decode_slots.shape[0], inputs.verify_width
    emitting = inputs.emitting.clamp(min=0).unsqueeze(1)
    order = torch.arange(len(emitting), device=emitting.device).unsqueeze(1)
    places = torch.where(
        emitting < num_decode,
        emitting * width + torch.arange(width, device=emitting.device),
        num_decode * width + order,
    )
    scores = log_probs(logits, chosen, head, inputs.num_logprobs)
    return TokenScores(*(each[places] for each in scores))


def prompt_scores(inputs: StepInputs, hidden: Tensor, head: LMHead) -> TokenScores | None:
    """Of the tokens that stand behind those of the prefill grid `[C, T]`, from all `hidden
    [tokens, hidden]`; what is said of an unknown one counts for nothing. None where the step asks
    for none."""
    if inputs.num_prompt_logprobs < 0:
        return None
    shape = inputs.prefill_tokens.shape
    first = inputs.decode_slots.shape[0] * inputs.verify_width
    index = torch.arange(shape[1], dtype=torch.int32, device=hidden.device)
    ids = torch.where(
        index == inputs.prefill_counts.unsqueeze(1) - 1,
        inputs.prefill_next.clamp(min=0).unsqueeze(1),
        F.pad(inputs.prefill_tokens[:, 1:], (0, 1)),
    ).flatten()
    parts = [
        log_probs(head(some), some_ids, head, inputs.num_prompt_logprobs)
        for some, some_ids in zip(
            hidden[first : first + len(ids)].split(_PROMPT_ROWS),
            ids.split(_PROMPT_ROWS),
            strict=True,
        )
    ]
    scores = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return TokenScores(*(each.unflatten(0, shape) for each in scores))


def _guided(inputs: StepInputs, shaped: Tensor, logits: Tensor, head: LMHead) -> Tensor:
    """`shaped` with what the grammars of guided rows forbid at -inf.

    Where the request itself forbids all that is left, before `min_tokens` or by `bad_words`, the
    grammar has its way, and `logits` say which of it.
    """
    if inputs.masks is None or inputs.masked is None:
        return shaped
    allowed = constrain(shaped, inputs.masks, inputs.masked, head)
    if shaped is logits:
        return allowed
    best = head.tp.all_gather(allowed.amax(1).unsqueeze(0), dim=0).amax(0).unsqueeze(1)
    instead = constrain(logits, inputs.masks, inputs.masked, head)
    return torch.where(best > float("-inf"), allowed, instead)


def _token_slots(inputs: StepInputs, scratch_slot: int) -> Tensor:
    """The slot of every token row of a step: `[tokens] int32`."""
    slots = torch.cat(
        [
            inputs.decode_slots.repeat_interleave(inputs.verify_width),
            inputs.prefill_slots.repeat_interleave(inputs.prefill_tokens.shape[1]),
        ]
    )
    return F.pad(slots, (0, inputs.num_tokens - len(slots)), value=scratch_slot)
