"""From vocabulary-sharded logits to drawn token ids and their log-probabilities."""

import torch
from torch import Tensor

from models.layers import LMHead
from models.ops import Ops
from models.sampler import greedy
from models.scores import SamplingRows, choice_scores
from models.truncation import limbs

__all__ = ["SamplingRows", "log_probs", "sample"]


def sample(logits: Tensor, rows: SamplingRows, head: LMHead) -> Tensor:
    """A token per row, `[rows] int32`, equal on every rank.

    Of `logits [rows, local vocabulary]` divided by the temperature, first `min_p` cuts, then
    `top_k`, then `top_p` what these leave, and the noise of the row's seed and position chooses
    among the rest (design page, "One decode step", 2). At temperature 0 it is the argmax.
    """
    if head.tp.size == 1:
        return head.ops.sample(logits, rows)
    return greedy(choice_scores(logits, rows, head.start, head.tp), head)


def log_probs(
    logits: Tensor, ids: Tensor, head: LMHead, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a distribution says of `ids [rows] int32` and which tokens it favours.

    Returns the log-probabilities `[rows] float32` of the ids, their ranks `[rows] int32` (1 for
    the most probable, equals by id), and the `num_top` most probable tokens in that order:
    `[rows, num_top] int32` and their log-probabilities. Equal on every rank, and the same for
    every row count and sharding.
    """
    tp, columns = head.tp, logits.shape[1]
    logits = logits.float()
    best = tp.all_gather(logits.amax(1).unsqueeze(0), dim=0).amax(0).unsqueeze(1)
    # Down to 2**-38 of the most probable token: below float32's own precision of the sum.
    sums = tp.all_reduce(limbs((logits - best).exp(), 3).sum(2, dtype=torch.int32)).float()
    total = sums[0] * 2**-12 + (sums[1] * 2**-25 + sums[2] * 2**-38)
    log_total = total.log().unsqueeze(1)

    local = (ids - head.start).unsqueeze(1)
    mine = (local >= 0) & (local < columns)
    found = logits.gather(1, torch.where(mine, local, 0).long())
    chosen = tp.all_reduce(torch.where(mine, found, 0))
    places = torch.arange(columns, dtype=torch.int32, device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (places < local))
    ranks = 1 + tp.all_reduce(before.int().sum(1, dtype=torch.int32))

    top, top_ids = _top(logits, num_top, head)
    # In this order: the difference of near logits is exact.
    return (chosen - best - log_total).squeeze(1), ranks, top_ids, top - best - log_total


def _top(logits: Tensor, num_top: int, head: LMHead) -> tuple[Tensor, Tensor]:
    """The `num_top` largest logits of all ranks and their ids, `[rows, num_top]` each."""
    top, places = _largest(logits, min(num_top, logits.shape[1]), head.ops)
    ids = places + head.start
    if head.tp.size == 1 or num_top == 0:
        return top, ids
    # Ranks in order, each in order of its ids: among equals the lower id still comes first.
    candidates, ids = (head.tp.all_gather(t, dim=1) for t in (top, ids))
    top, places = _largest(candidates, num_top, head.ops)
    return top, ids.gather(1, places.long())


def _largest(values: Tensor, count: int, ops: Ops) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of `values [rows, n]`, the leftmost first among equals, and
    where they stand: `[rows, count]` each, the places int32.

    One by one, because topk promises no order among equals.
    """
    # Taken places are marked with -inf, which no place still to be taken may have.
    rest = values.clamp(min=torch.finfo(torch.float32).min)
    places = torch.empty_like(values[:, :0], dtype=torch.int32)
    for _ in range(count):
        place = ops.argmax(rest).unsqueeze(1)
        rest = rest.scatter(1, place.long(), float("-inf"))
        places = torch.cat([places, place], dim=1)
    return values.gather(1, places.long()), places
