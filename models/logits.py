"""What a request asks of the distribution, worked into its logits before temperature.

Rows are `logits [rows, local vocabulary]` of one rank, float32 or narrower; results are float32,
but for those of `constrain`, which keep their type.
An id of another rank is simply not there, and padded columns stay at -inf. The functions stand in
the order in which vLLM applies them.
"""

import torch
from torch import Tensor

from models.grammar_masks import constrained
from models.layers import LMHead

_MINUS_INFINITY = float("-inf")


def constrain(logits: Tensor, bitmask: Tensor, masked: Tensor, head: LMHead) -> Tensor:
    """Only the tokens that a grammar allows, in the rows that are `masked [rows] bool`.

    Bit i % 32 of `bitmask [rows, ceil(vocabulary / 32)] int32` at i // 32 allows token i.
    """
    if head.tp.size == 1:
        return head.ops.constrain(logits, bitmask, masked)
    return constrained(logits, bitmask, masked, head.start)


def forbid(
    logits: Tensor, words: Tensor, history: Tensor, prompt_lens: Tensor, head: LMHead
) -> Tensor:
    """-inf on the last token of each bad word whose other tokens end the output.

    `words [rows, words, length] int32` are right-aligned, padded with -1; the rest as in
    `penalize`.
    """
    prefixes, last = words[:, :, :-1], words[:, :, -1]
    ends = (history >= 0).sum(1, keepdim=True, dtype=torch.int32)
    back = torch.arange(-prefixes.shape[2], 0, dtype=torch.int32, device=history.device)
    places = ends + back
    tail = history.gather(1, places.clamp(min=0).long())
    is_output = places >= prompt_lens.unsqueeze(1)
    found = (tail.unsqueeze(1) == prefixes) & is_output.unsqueeze(1)
    complete = (found | (prefixes < 0)).all(2)
    return _add_at(logits.float(), last, torch.where(complete, _MINUS_INFINITY, 0.0), head)


def edit(
    logits: Tensor, ids: Tensor, values: Tensor, until: Tensor, positions: Tensor, head: LMHead
) -> Tensor:
    """`values [rows, edits] float32`, finite or -inf, added to the logits of `ids [rows, edits]
    int32`, -1 where there is none; an id that occurs twice gets both.

    An edit holds while the position of the token being chosen, `positions [rows] int32`, is before
    its `until [rows, edits] int32`.
    """
    holds = positions.unsqueeze(1) < until
    return _add_at(logits.float(), ids, torch.where(holds, values, 0.0), head)


def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_lens: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    head: LMHead,
) -> Tensor:
    """vLLM's three penalties, each `[rows] float32`.

    `history [rows, length] int32` are the tokens before the one being chosen, then -1; the first
    `prompt_lens [rows] int32` of them are the prompt. `repetition` divides the positive logits of
    all tokens in it and multiplies the others; then `frequency` is subtracted as often as a token
    was output, and `presence` once if it was.
    """
    logits = logits.float()
    index = torch.arange(history.shape[1], dtype=torch.int32, device=history.device)
    is_output = (index >= prompt_lens.unsqueeze(1)).int()
    none = torch.zeros_like(logits, dtype=torch.int32)
    places, mine = _columns_of(history, logits, head)
    seen = none.scatter_add(1, places, mine.int())
    counts = none.scatter_add(1, places, torch.where(mine, is_output, 0))

    # Only what occurs is computed, and what occurs twice is written twice. Another rank's id stands
    # for column 0, which gets what it would without.
    found, counts = logits.gather(1, places), counts.gather(1, places)
    factor = repetition.unsqueeze(1)
    repeated = torch.where(found > 0, found / factor, found * factor)
    found = torch.where(seen.gather(1, places) > 0, repeated, found)
    found = found - frequency.unsqueeze(1) * counts
    found = found - presence.unsqueeze(1) * (counts > 0)
    return logits.scatter(1, places, found)


def _add_at(columns: Tensor, ids: Tensor, addends: Tensor, head: LMHead) -> Tensor:
    """`columns [rows, local vocabulary]` with `addends [rows, n]` added at `ids [rows, n]`, except
    for ids that are -1 or another rank's."""
    places, mine = _columns_of(ids, columns, head)
    return columns.scatter_add(1, places, torch.where(mine, addends, 0))


def _columns_of(ids: Tensor, columns: Tensor, head: LMHead) -> tuple[Tensor, Tensor]:
    """Where `ids [rows, n]` stand among `columns [rows, local vocabulary]`: int64, 0 for those that
    are -1 or another rank's; and which are this rank's, bool."""
    local = ids - head.start
    mine = (local >= 0) & (local < columns.shape[1])
    return torch.where(mine, local, 0).long(), mine
