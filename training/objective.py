"""The loss: weighted cross-entropy over a part of the vocabulary that stands for all of it.

Softmax over 49,152 tokens would cost as much as the drafter's layers. The candidates are those
that matter for certain (labels, frequent tokens, the target's favourites) and a uniform sample of
all others, whose exponentials count for those left out: an unbiased estimate of the normaliser.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_ROWS_AT_ONCE = 512


class Candidates(NamedTuple):
    """`ids [n] int64` ascending and `log_counts [n] float32`: the log of how many tokens each
    stands for."""

    ids: Tensor
    log_counts: Tensor


class Soft(NamedTuple):
    """The target's most probable tokens at each row: `ids [rows, k] int64` and `probs [rows, k]
    float32`, which sum to 1."""

    ids: Tensor
    probs: Tensor


class Scored(NamedTuple):
    """`loss`, the weighted sum over rows, and `best [rows] int64`, the best candidate's id."""

    loss: Tensor
    best: Tensor


def choose_candidates(
    certain: Tensor, vocab_size: int, num_random: int, generator: torch.Generator
) -> Candidates:
    """The tokens in `certain`, each for itself, and `num_random` of the others for all others."""
    is_certain = torch.zeros(vocab_size, dtype=torch.bool)
    is_certain[certain.cpu()] = True
    others = (~is_certain).nonzero().flatten()
    log_counts = torch.zeros(vocab_size)
    if num_random < len(others):
        chosen = others[torch.randperm(len(others), generator=generator)[:num_random]]
        if num_random:
            log_counts[chosen] = math.log(len(others) / num_random)
    else:
        chosen = others
    is_certain[chosen] = True
    ids = is_certain.nonzero().flatten()
    return Candidates(ids.to(certain.device), log_counts[ids].to(certain.device))


def score(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: Tensor,
    candidates: Candidates,
    soft: Soft | None = None,
    distill: float = 0.0,
) -> Scored:
    """The loss of states `hidden [rows, hidden]` against `labels [rows] int64`, both weighted by
    `weights [rows] float32`; `head [vocabulary, hidden]` is not trained.

    With `soft`, `distill` of the loss is the cross-entropy with the target's distribution.
    """
    places = torch.searchsorted(candidates.ids, labels)
    columns, shares = places.unsqueeze(1), torch.ones_like(weights).unsqueeze(1)
    if soft is not None and distill:
        soft_places = torch.searchsorted(candidates.ids, soft.ids)
        columns = torch.cat([columns, soft_places], dim=1)
        shares = torch.cat([(1 - distill) * shares, distill * soft.probs], dim=1)
    part = head[candidates.ids]
    loss, best = _CrossEntropy.apply(hidden, part, candidates.log_counts, columns, shares, weights)
    return Scored(loss, candidates.ids[best])


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradient in one go, a few rows at a time: logits are never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        log_counts: Tensor,
        columns: Tensor,
        shares: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        loss = weights.new_zeros(())
        for first in range(0, len(hidden), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            logits = (hidden[rows] @ head.t()).float()
            best[rows] = logits.argmax(dim=-1)
            logits += log_counts
            normaliser = logits.logsumexp(dim=-1)
            entropy = normaliser - (shares[rows] * logits.gather(1, columns[rows])).sum(1)
            loss += (weights[rows] * entropy).sum()
            probs = logits.sub_(normaliser.unsqueeze(1)).exp_()
            probs.scatter_add_(1, columns[rows], -shares[rows])
            probs *= weights[rows].unsqueeze(1)
            gradient[rows] = probs.to(hidden.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: FunctionCtx, loss: Tensor, best: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * loss.to(gradient.dtype), None, None, None, None, None
