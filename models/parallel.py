"""Tensor parallelism: which part of each weight a rank holds, and the collectives between ranks.

Any size works. A dimension that does not divide is padded with zeros, and heads are laid out by
`HeadLayout` so that the result equals that of a single rank (design page, "Tensor parallel").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's place among `size`. `group` is None exactly when `size` is 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert (self.group is None) == (self.size == 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over ranks, same shape."""
        if self.group is None:
            return x
        return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", self.group))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' `x` concatenated along `dim`, rank 0 first."""
        if self.group is None:
            return x
        gathered = funcol.all_gather_single(x.contiguous(), gather_dim=0, group=self.group)
        gathered = funcol.wait_tensor(gathered)
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)


@dataclass(frozen=True, slots=True)
class Piece:
    """`[start, stop)` of a full dimension, found at `local` in the rank's part."""

    start: int
    stop: int
    local: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one dimension of a weight: `pieces`, zeros elsewhere."""

    dim: int
    size: int
    pieces: tuple[Piece, ...]


def even_part(total: int, tp: TensorParallel, dim: int) -> Part:
    """An equal, contiguous share of a dimension of `total`, the last ranks' padded with zeros."""
    size = -(-total // tp.size)
    start = min(tp.rank * size, total)
    stop = min(start + size, total)
    return Part(dim, size, (Piece(start, stop, 0),) if stop > start else ())


def head_part(heads: Sequence[int | None], head_dim: int, dim: int) -> Part:
    """The rows (or columns) of the given heads, in this order; None is a head of zeros.

    Neighbours in the checkpoint are read as one piece.
    """
    pieces: list[Piece] = []
    for local, head in enumerate(heads):
        if head is None:
            continue
        piece = Piece(head * head_dim, (head + 1) * head_dim, local * head_dim)
        previous = pieces[-1] if pieces else None
        if previous and previous.stop == piece.start and heads[local - 1] is not None:
            pieces[-1] = Piece(previous.start, piece.stop, previous.local)
        else:
            pieces.append(piece)
    return Part(dim, len(heads) * head_dim, tuple(pieces))


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The attention heads of one rank; shapes are the same on every rank.

    `kv_heads` are indices in the checkpoint, None a padded head. `query_heads` has `group` entries
    per KV head, in the same order.
    """

    kv_heads: tuple[int | None, ...]
    query_heads: tuple[int | None, ...]

    @property
    def group(self) -> int:
        """Query heads per KV head on this rank."""
        return len(self.query_heads) // len(self.kv_heads)


def head_layout(num_heads: int, num_kv_heads: int, tp: TensorParallel) -> HeadLayout:
    """Spread heads over ranks: pad KV heads to a multiple of the ranks, or replicate them.

    With fewer KV heads than ranks, each KV head lives on `copies` ranks (the largest divisor of
    the rank count that leaves every head a place) and its query heads are split among them.
    """
    full_group = num_heads // num_kv_heads
    divisors = [d for d in range(1, tp.size + 1) if tp.size % d == 0]
    copies = max(d for d in divisors if d == 1 or d * num_kv_heads <= tp.size)
    local_kv = -(-num_kv_heads * copies // tp.size)
    group = -(-full_group // copies)
    kv_heads: list[int | None] = []
    query_heads: list[int | None] = []
    for place in range(tp.rank * local_kv, (tp.rank + 1) * local_kv):
        kv_head, copy = divmod(place, copies)
        exists = kv_head < num_kv_heads
        kv_heads.append(kv_head if exists else None)
        for member in range(copy * group, (copy + 1) * group):
            real = exists and member < full_group
            query_heads.append(kv_head * full_group + member if real else None)
    return HeadLayout(tuple(kv_heads), tuple(query_heads))
