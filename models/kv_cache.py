"""Paged KV pools. Target and drafter layers share one block table, and so one page numbering."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer keeps per token on this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's pool: `k` and `v` are `[num_pages, page_size, num_kv_heads, head_dim]`.

    Page 0 is the null page: padded rows write finite values there and every read of it is masked.
    """

    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite `slots [tokens] int32` with `k`, `v` `[tokens, num_kv_heads, head_dim]`."""
        self.k.flatten(0, 1).index_put_((slots,), k)
        self.v.flatten(0, 1).index_put_((slots,), v)

    def gather(self, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """K and V `[rows, pages * page_size, num_kv_heads, head_dim]` of `[rows, pages] int32`."""
        return self.k[block_table].flatten(1, 2), self.v[block_table].flatten(1, 2)


def allocate(specs: list[KVSpec], num_pages: int, page_size: int) -> list[LayerKV]:
    """A zeroed pool per layer, in the order of `specs` (target layers, then draft layers).

    Zeros, not garbage: a masked read times NaN would still be NaN.
    """
    return [
        LayerKV(
            *(
                torch.zeros(
                    num_pages, page_size, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype
                )
                for _ in range(2)
            )
        )
        for spec in specs
    ]
