"""Logits of one sequence apart from the engine, for judging how close a decision was."""

import torch
from torch import Tensor

from models.kv_cache import allocate
from models.ops import Grid
from models.target import Target


def next_token_logits(target: Target, token_ids: list[int]) -> Tensor:
    """float32 logits `[vocab]` behind `token_ids`, computed with KV of its own.

    Only for a target on a single rank: others hold a part of the vocabulary.
    """
    length = len(token_ids)
    positions = torch.arange(length, dtype=torch.int32)
    kv = allocate(target.kv_specs(), num_pages=1, page_size=length)
    table, slots = torch.zeros(2, 1, 1, dtype=torch.int32)
    valid = torch.ones(1, length, dtype=torch.bool)
    grid = Grid(slots[0], positions.unsqueeze(0), valid)
    context = target.ops.causal_context(table, [grid], length, 1, length)
    tokens = torch.tensor(token_ids, dtype=torch.int32)
    hidden, _ = target(tokens, positions, positions, context, kv)
    return target.logits(hidden[-1:])[0].float()
