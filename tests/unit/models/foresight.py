"""Drafts that are right: those of a drafter that knows what requests will emit."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.steps import ModelRank


def foresee(
    monkeypatch: pytest.MonkeyPatch,
    sequences: Mapping[int, Sequence[int]],
    wrong: float = 0.0,
    rng: random.Random | None = None,
) -> None:
    """Draft, for a request whose choice has one of these seeds, the tokens of its sequence (prompt
    and output), each with probability `wrong` another one. Others get what the drafter proposes.
    """
    rng, verify, write = rng or random.Random(0), ModelRank.verify, ModelRank.write_drafts
    lengths: dict[int, Tensor] = {}  # of the rank's last step

    def seeing(rank: ModelRank, *args: Any) -> Any:
        result, left = verify(rank, *args)
        lengths[id(rank)] = left.context_lens
        return result, left

    def foresighted(rank: ModelRank, slots: Tensor, drafts: Tensor) -> None:
        seeds = rank.sampling.seeds[slots].view(torch.int64).flatten().tolist()
        for i, (length, seed) in enumerate(zip(lengths[id(rank)].tolist(), seeds, strict=True)):
            known = sequences.get(seed, ())[length + 1 :][: drafts.shape[1]]
            right = [rng.randrange(rank.vocab_size) if rng.random() < wrong else t for t in known]
            drafts[i, : len(right)] = torch.tensor(right, dtype=torch.int32)
        write(rank, slots, drafts)

    monkeypatch.setattr(ModelRank, "verify", seeing)
    monkeypatch.setattr(ModelRank, "write_drafts", foresighted)
