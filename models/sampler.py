"""From vocabulary-sharded logits to token ids."""

import torch
from torch import Tensor

from models.layers import LMHead


def greedy(logits: Tensor, head: LMHead) -> Tensor:
    """Argmax over the whole vocabulary without gathering it; ties go to the lowest id.

    `logits [rows, local vocabulary]` of this rank; returns `[rows] int32`, equal on every rank.
    Only each rank's best value and id cross ranks.
    """
    local = head.ops.argmax(logits)
    ids = local + head.start
    if head.tp.size == 1:
        return ids
    best = logits.gather(-1, local.long().unsqueeze(1)).float()
    values = head.tp.all_gather(best.transpose(0, 1), dim=0)
    ids = head.tp.all_gather(ids.unsqueeze(0), dim=0)
    winners = values == values.amax(dim=0)
    return torch.where(winners, ids, torch.iinfo(torch.int32).max).amin(dim=0)
