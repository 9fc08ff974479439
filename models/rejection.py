"""Acceptance of drafts: compare each with what the target would have emitted there."""

import torch
from torch import Tensor


def accept(target_ids: Tensor, drafts: Tensor) -> Tensor:
    """The tokens a verify step emits (design page, "One decode step", 2).

    `target_ids [rows, k + 1]` are x_0..x_k, the target's choice behind each verified token;
    `drafts [rows, k]` are d_1..d_k, -1 where none was verified. Draft d_{i+1} is accepted while
    it equals x_i. Returns `[rows, k + 1] int32`: x_0..x_a of `a` accepted drafts, then -1.
    """
    rejected = (target_ids[:, :-1] != drafts) | (drafts < 0)
    # Counted by a sum: an integer cumprod has no lowering on Neuron.
    accepted = rejected.int().cumsum(1).eq(0).sum(1, keepdim=True)
    width = torch.arange(target_ids.shape[1], device=target_ids.device)
    return torch.where(width <= accepted, target_ids, -1).to(torch.int32)


def count_valid(sampled: Tensor, vocab_size: int) -> Tensor:
    """Valid tokens of each `sampled [rows, width]` row (`>= 0`, `< vocab_size`): `[rows] int32`."""
    return ((sampled >= 0) & (sampled < vocab_size)).sum(1, dtype=torch.int32)
