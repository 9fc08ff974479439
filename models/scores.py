"""Scores whose argmax is a draw from a row's distribution."""

from typing import NamedTuple

import torch
from torch import Tensor

from models.noise import gumbel
from models.parallel import TensorParallel
from models.truncation import kept


class SamplingRows(NamedTuple):
    """How each of `[rows]` is sampled; meanings as in `actors.messages.SamplingParams`.

    `seeds` are the low and the high half of a 64-bit seed, `positions` those of the tokens being
    chosen.
    """

    temperature: Tensor  # [rows] float32
    top_p: Tensor  # [rows] float32
    min_p: Tensor  # [rows] float32
    top_k: Tensor  # [rows] int32
    seeds: Tensor  # [rows, 2] int32
    positions: Tensor  # [rows] int32


def choice_scores(
    logits: Tensor, rows: SamplingRows, start: Tensor | int, tp: TensorParallel
) -> Tensor:
    """`[rows, local vocabulary] float32`: log-probabilities, up to a constant per row, plus Gumbel
    noise; -inf for tokens cut off. Where the temperature is 0, the logits as they are.

    `logits [rows, local vocabulary]` are those of the ids from `start` on.
    """
    logits = logits.float()
    sampled = rows.temperature.unsqueeze(1) > 0
    temperature = torch.where(sampled, rows.temperature.unsqueeze(1), 1)
    best = tp.all_gather(logits.amax(1).unsqueeze(0), dim=0).amax(0).unsqueeze(1)
    distances = (best - logits) / temperature
    stays = kept(distances, rows.top_k, rows.top_p, rows.min_p, tp)
    ids = start + torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel(rows.seeds, rows.positions, ids)
    return torch.where(sampled, torch.where(stays, noise - distances, float("-inf")), logits)
