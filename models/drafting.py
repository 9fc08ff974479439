"""The drafter's half of a step on one rank: inject, then propose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.dflash import DFlashDrafter
from models.kv_cache import LayerKV


class DraftInputs(NamedTuple):
    """What a verification leaves for the drafter: of its N token rows and its D emitting rows."""

    aux: Tensor  # [N, captured * hidden]: the captured target states
    positions: Tensor  # [N] int32
    inject_slots: Tensor  # [N] int32: cache slots, rejected and padded tokens on the null page
    slots: Tensor  # [D] int32
    blocks: Tensor  # [D, K + 1] int32: query blocks
    context_lens: Tensor  # [D] int32: injected tokens that a block may see

    def packed(self) -> Tensor:
        """All but `aux`, one behind the other, `[2 * N + D * (K + 3)] int32`."""
        return torch.cat([part.flatten() for part in self[1:]])

    @classmethod
    def unpack(cls, aux: Tensor, packed: Tensor, num_rows: int) -> "DraftInputs":
        """What `packed` packed, with `num_rows` emitting rows."""
        tokens = aux.shape[0]
        sizes = [tokens, tokens, num_rows, packed.numel() - 2 * (tokens + num_rows), num_rows]
        positions, inject_slots, slots, blocks, context_lens = packed.split(sizes)
        blocks = blocks.view(num_rows, -1) if num_rows else blocks.view(0, 0)
        return cls(aux, positions, inject_slots, slots, blocks, context_lens)


@dataclass(frozen=True, slots=True)
class DrafterRank:
    """A drafter with its KV pools, beside a rank of the target or on a rank of its own.

    `inject` and `block_hidden` are the drafter's, as a backend compiled them. Pages have the
    target's numbers; `block_table [slots, pages] int32` says which are whose.
    """

    drafter: DFlashDrafter
    inject: Callable[..., None]
    block_hidden: Callable[..., Tensor]
    kv: Sequence[LayerKV]
    block_table: Tensor

    @classmethod
    def of(
        cls,
        drafter: DFlashDrafter,
        kv: Sequence[LayerKV],
        block_table: Tensor,
        compiled: Callable[[Callable[..., object]], Callable[..., object]] = lambda region: region,
    ) -> "DrafterRank":
        """Its regions through `compiled`; as they are by default."""
        return cls(
            drafter=drafter,
            inject=compiled(drafter.inject),  # type: ignore[arg-type]
            block_hidden=compiled(drafter.block_hidden),  # type: ignore[arg-type]
            kv=kv,
            block_table=block_table,
        )

    def draft(
        self, inputs: DraftInputs, num_drafts: int, context_pages: int
    ) -> tuple[Tensor, Tensor] | None:
        """Take in what was verified and draft a block behind each row's new bonus token.

        Returns this rank's logits `[D, n, V]` of the first `n = num_drafts` drafts and the drafts
        `[D, n] int32`; with none to propose it only injects, and returns None. Every row may look
        back at `context_pages` KV pages.
        """
        self.inject(inputs.aux, inputs.positions, inputs.inject_slots, self.kv)
        if num_drafts == 0:
            return None
        drafter = self.drafter
        context = drafter.ops.block_context(
            self.block_table,
            inputs.slots,
            inputs.context_lens,
            drafter.config.block_size,
            self.kv[0].page_size,
            context_pages,
        )
        hidden = self.block_hidden(inputs.blocks, inputs.context_lens, context, self.kv)
        logits = drafter.draft_logits(hidden, num_drafts)
        return logits, drafter.draft_tokens(logits)
