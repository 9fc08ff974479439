"""Drafts that are right: those of a drafter that knows what requests will emit."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from models.rows import Emitted
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
    rng, propose = rng or random.Random(0), ModelRank._propose

    def foresighted(rank: ModelRank, drafter: Any, inputs: Any, emitted: Emitted, size: int) -> Any:
        logits = propose(rank, drafter, inputs, emitted, size)
        seeds = rank.sampling.seeds[emitted.slots].view(torch.int64).flatten().tolist()
        rows = zip(emitted.slots.tolist(), emitted.context_lens.tolist(), seeds, strict=True)
        for slot, length, seed in rows:
            known = sequences.get(seed, ())[length + 1 :][: inputs.num_drafts]
            drafts = [rng.randrange(rank.vocab_size) if rng.random() < wrong else t for t in known]
            rank.state.drafts[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        return logits

    monkeypatch.setattr(ModelRank, "_propose", foresighted)
