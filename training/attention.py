"""Attention of training: many blocks of one sequence share its context keys.

A query block sees the keys before its anchor and its own block, nothing of other blocks. So it is
two small products under one softmax, not one large masked square.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.kv_cache import LayerKV
from models.ops import TorchOps

# Blocks whose scores are computed at once: anchors ascend, so that early ones read fewer keys.
_BLOCKS_AT_ONCE = 32


class Piece(NamedTuple):
    """One sequence of a batch: its tokens in the context, and how many blocks it has."""

    first_token: int
    num_tokens: int
    num_blocks: int


class _Chunk(NamedTuple):
    """Neighbouring blocks of one sequence, which see no key behind `[first_key, last_key)`.

    `before [blocks, keys] bool` is True where a block may look.
    """

    first_block: int
    last_block: int
    first_key: int
    last_key: int
    before: Tensor


class BlockContext(NamedTuple):
    """What each block of a batch may see of the context; see `make_context`."""

    chunks: tuple[_Chunk, ...]


def make_context(pieces: Sequence[Piece], anchors: Tensor) -> BlockContext:
    """The context of the blocks at `anchors [rows] int32`, which ascend in each piece: the keys of
    its own sequence strictly before its anchor."""
    chunks, row = [], 0
    for piece in pieces:
        end = row + piece.num_blocks
        for first in range(row, end, _BLOCKS_AT_ONCE):
            last = min(first + _BLOCKS_AT_ONCE, end)
            num_keys = int(anchors[last - 1])
            assert num_keys <= piece.num_tokens
            keys = torch.arange(num_keys, device=anchors.device, dtype=torch.int32)
            before = keys < anchors[first:last].unsqueeze(1)
            start = piece.first_token
            chunks.append(_Chunk(first, last, start, start + num_keys, before))
        row = end
    return BlockContext(tuple(chunks))


class TrainingOps(TorchOps):
    """`TorchOps` with a `block_attention` that gradients pass at reasonable cost.

    It takes the context as one page that holds all sequences, one after the other.
    """

    def block_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, context: BlockContext
    ) -> Tensor:
        """See `TorchOps.block_attention`; context as `make_context` made it."""
        keys, values = kv.k[0].transpose(0, 1), kv.v[0].transpose(0, 1)  # [kv_heads, tokens, dim]
        outs = []
        for chunk in context.chunks:
            rows, seen = slice(*chunk[:2]), slice(*chunk[2:4])
            before = (keys[:, seen], values[:, seen])
            outs.append(_attend(q[rows], k[rows], v[rows], *before, chunk.before))
        return torch.cat(outs)


def _attend(
    q: Tensor, own_k: Tensor, own_v: Tensor, keys: Tensor, values: Tensor, before: Tensor
) -> Tensor:
    """Blocks of one sequence: q `[blocks, block, kv_heads, group, dim]`, own k and v `[blocks,
    block, kv_heads, dim]`, context `[kv_heads, keys, dim]`, before `[blocks, keys]`.
    Returns `[blocks, block, heads * dim]`."""
    blocks, block, kv_heads, group, dim = q.shape
    # Rows of one KV head: block by block, and in it all query heads' places.
    q = q.permute(2, 0, 3, 1, 4).reshape(kv_heads, blocks, group * block, dim) * dim**-0.5
    own_k, own_v = own_k.permute(2, 0, 1, 3), own_v.permute(2, 0, 1, 3)
    context = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (blocks, -1))
    context = context.masked_fill(~before.unsqueeze(1), float("-inf"))
    own = q @ own_k.transpose(-1, -2)
    weights = torch.cat([context, own], dim=-1).softmax(dim=-1)
    context, own = weights.split([keys.shape[1], block], dim=-1)
    out = (context.flatten(1, 2) @ values).view(q.shape) + own @ own_v
    return out.view(kv_heads, blocks, group, block, dim).permute(1, 3, 0, 2, 4).flatten(2)
