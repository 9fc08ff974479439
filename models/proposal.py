"""Pure tensor functions that place a step's tokens and prepare draft blocks.

They are the reference document's `_prepare_proposal_inputs`, one function per idea; all are
integer arithmetic on the device, so a step needs nothing from the host once it is submitted.
"""

import torch
from torch import Tensor

from models.rejection import count_valid


def prev_rejected(
    prev_sampled: Tensor, prev_planned: Tensor, prev_in_flight: Tensor, vocab_size: int
) -> Tensor:
    """How far each row's optimistic position is ahead of the truth, `[rows] int32`.

    `prev_sampled [rows, width]` is what the previous step emitted, `prev_planned [rows]` how many
    drafts its plan had: the host took all of them as accepted, also where the device had fewer to
    verify. Rows that were not in flight have exact positions: 0.
    """
    rejected = (1 + prev_planned) - count_valid(prev_sampled, vocab_size)
    return torch.where(prev_in_flight, rejected, 0)


def bonus_tokens(sampled: Tensor, vocab_size: int) -> Tensor:
    """Last valid token of each `sampled [rows, width]` row, -1 where there is none: `[rows]`."""
    width = torch.arange(sampled.shape[1], device=sampled.device, dtype=torch.int32)
    valid = (sampled >= 0) & (sampled < vocab_size)
    last = torch.where(valid, width, -1).amax(1, keepdim=True)
    tokens = sampled.gather(1, last.clamp(min=0).long()).squeeze(1)
    return torch.where(last.squeeze(1) >= 0, tokens, -1)


def paged_slots(positions: Tensor, block_table: Tensor, valid: Tensor, page_size: int) -> Tensor:
    """Cache slots of `positions [rows, width]` through `block_table [rows, pages]`.

    Invalid tokens go to page 0. The clamp guards only those: a valid position is always within
    its row's pages. Returns `[rows, width] int32`.
    """
    index = (positions // page_size).clamp(0, block_table.shape[1] - 1)
    pages = block_table.gather(1, index.long())
    return (torch.where(valid, pages, 0) * page_size + positions % page_size).to(torch.int32)


def query_blocks(bonus: Tensor, num_drafts: int, mask_token_id: int) -> Tensor:
    """`[bonus, mask, ..., mask]` of length `num_drafts + 1` for each of `bonus [rows] int32`.

    A row without a bonus (-1) gets token 0 there; it is computed and never used.
    """
    masks = bonus.new_full((bonus.shape[0], num_drafts), mask_token_id)
    return torch.cat([bonus.clamp(min=0).unsqueeze(1), masks], dim=1)
