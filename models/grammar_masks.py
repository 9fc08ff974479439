"""What a grammar forbids."""

import torch
from torch import Tensor


def constrained(logits: Tensor, bitmask: Tensor, masked: Tensor, start: Tensor | int) -> Tensor:
    """`logits [rows, columns]` of the ids from `start` on, with -inf where a bit of `bitmask [rows,
    words] int32` is 0 (bit i % 32 of word i // 32 is token i's), in the rows that are `masked
    [rows] bool`."""
    ids = start + torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    # The ids of padded columns may lie beyond the mask.
    places = (ids // 32).clamp(max=bitmask.shape[1] - 1)
    refused = (bitmask[:, places] >> (ids % 32)) & 1 == 0
    return logits.masked_fill(refused & masked.unsqueeze(1), float("-inf"))
