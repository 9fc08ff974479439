"""What the device remembers of each request between steps, by slot."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotState:
    """Device state, one row per slot and a last row that padded rows may scribble on.

    `sampled [slots, K + 1]` is the last emitted row, -1 padded; `planned [slots]` how many drafts
    the plan gave that step (0 for prefill), which is what the host counts on until it reads more;
    `drafts [slots, K]` and `num_drafts [slots]` what it proposed next;
    `block_table [slots, pages]` the request's KV pages. All int32.
    """

    sampled: Tensor
    planned: Tensor
    drafts: Tensor
    num_drafts: Tensor
    block_table: Tensor

    @classmethod
    def allocate(cls, num_slots: int, num_drafts: int, num_pages: int) -> "SlotState":
        """Fresh state for `num_slots` requests of up to `num_pages` KV pages each."""
        rows = num_slots + 1
        return cls(
            sampled=torch.full((rows, num_drafts + 1), -1, dtype=torch.int32),
            planned=torch.zeros(rows, dtype=torch.int32),
            drafts=torch.full((rows, num_drafts), -1, dtype=torch.int32),
            num_drafts=torch.zeros(rows, dtype=torch.int32),
            block_table=torch.zeros(rows, num_pages, dtype=torch.int32),
        )

    @property
    def scratch_slot(self) -> int:
        """The slot of padded rows."""
        return self.sampled.shape[0] - 1

    def reset(self, slots: Tensor) -> None:
        """Forget what earlier requests left in `slots [rows] int32`."""
        self.sampled.index_fill_(0, slots.long(), -1)
        self.planned.index_fill_(0, slots.long(), 0)
        self.num_drafts.index_fill_(0, slots.long(), 0)
