"""Attention over gathered pages, for the target's grids and the drafter's block."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kv_cache import LayerKV


@dataclass(frozen=True, slots=True)
class Grid:
    """Token rows arranged `[rows, width]`, each row reading the pages of one request.

    `block_table [rows, pages] int32`; `mask [rows, width, pages * page_size]` bool, True where a
    query may look.
    """

    block_table: Tensor
    mask: Tensor

    @property
    def num_tokens(self) -> int:
        return self.mask.shape[0] * self.mask.shape[1]


def causal_grid(block_table: Tensor, positions: Tensor, page_size: int) -> Grid:
    """A grid whose queries at `positions [rows, width]` see all keys up to their own position."""
    keys = torch.arange(
        block_table.shape[1] * page_size, dtype=torch.int32, device=positions.device
    )
    return Grid(block_table, keys <= positions.unsqueeze(-1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention.

    q `[rows, width, kv_heads, group, head_dim]`; k, v `[rows, length, kv_heads, head_dim]`; mask
    `[rows, width, length]` bool. Returns q's shape. The query heads of one KV head are folded into
    query rows, so keys and values are never repeated.
    """
    rows, width, kv_heads, group, head_dim = q.shape
    folded = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * width, head_dim)
    folded_mask = mask.unsqueeze(1).expand(-1, group, -1, -1).reshape(rows, 1, group * width, -1)
    out = F.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=folded_mask
    )
    return out.reshape(rows, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4)


def paged_attention(q: Tensor, kv: LayerKV, grids: list[Grid]) -> Tensor:
    """Causal attention of all token rows of a step.

    q `[tokens, kv_heads, group, head_dim]`, the grids' tokens one after the other, padding behind
    them. Returns `[tokens, kv_heads * group * head_dim]`, zeros for padding.
    """
    outs = []
    sizes = [grid.num_tokens for grid in grids]
    *parts, padding = q.split([*sizes, len(q) - sum(sizes)])
    for grid, part in zip(grids, parts, strict=True):
        k, v = kv.gather(grid.block_table)
        out = attend(part.unflatten(0, grid.mask.shape[:2]), k, v, grid.mask)
        outs.append(out.reshape(part.shape[0], -1))
    return torch.cat([*outs, torch.zeros_like(padding).flatten(1)])


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, block_table: Tensor, context_mask: Tensor
) -> Tensor:
    """Non-causal attention of draft blocks over injected context and the whole block.

    q `[rows, block, kv_heads, group, head_dim]`; k, v `[rows, block, kv_heads, head_dim]` are the
    block's own, concatenated and never paged, so they can't be seen by anyone later; block_table
    `[rows, pages]`; context_mask `[rows, pages * page_size]` bool.
    Returns `[rows, block, kv_heads * group * head_dim]`.
    """
    rows, block = q.shape[:2]
    context_k, context_v = kv.gather(block_table)
    mask = torch.cat([context_mask, context_mask.new_ones(rows, block)], dim=1)
    out = attend(
        q,
        torch.cat([context_k, k], dim=1),
        torch.cat([context_v, v], dim=1),
        mask.unsqueeze(1).expand(-1, block, -1),
    )
    return out.flatten(2)
