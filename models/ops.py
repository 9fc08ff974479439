"""The operations a backend may have its own kernels for; everything else is plain torch.

Model code takes an `Ops` and neither knows nor asks which one: `TorchOps` runs anywhere and is the
reference, `models.backends.native` has kernels for CPUs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import block_attention, causal_grid, paged_attention
from models.grammar_masks import constrained
from models.kv_cache import LayerKV
from models.parallel import TensorParallel
from models.scores import SamplingRows, choice_scores

# What an `Ops` makes of a step's grids once, for all layers: a pytree of tensors only it reads.
Context = Any


class Grid(NamedTuple):
    """Token rows `[rows, width]`; row i reads the pages of `slots[i]`, `slots [rows] int32`.

    A query at `positions [rows, width] int32` sees the keys up to and with its own. Tokens that
    are not `valid [rows, width] bool` are padding: whatever finite values they get are not used.
    """

    slots: Tensor
    positions: Tensor
    valid: Tensor


class Ops(Protocol):
    """One backend's operations. Weights come from `pack`; shapes are those of `TorchOps`."""

    def pack(self, weight: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def gated_mlp(
        self, x: Tensor, gate_up: Tensor, bias: Tensor | None, down: Tensor
    ) -> Tensor: ...

    def argmax(self, values: Tensor) -> Tensor: ...

    def constrain(self, logits: Tensor, bitmask: Tensor, masked: Tensor) -> Tensor: ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor: ...

    def causal_context(
        self,
        block_table: Tensor,
        grids: Sequence[Grid],
        page_size: int,
        context_pages: int,
        num_tokens: int,
    ) -> Context: ...

    def paged_attention(self, q: Tensor, kv: LayerKV, context: Context) -> Tensor: ...

    def block_context(
        self,
        block_table: Tensor,
        slots: Tensor,
        lens: Tensor,
        block: int,
        page_size: int,
        context_pages: int,
    ) -> Context: ...

    def block_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, context: Context
    ) -> Tensor: ...


class TorchOps:
    """Plain torch, for any device, and what the kernels of other backends are tested against."""

    def pack(self, weight: Tensor) -> Tensor:
        """`weight [out, in]` in the form that `linear` takes."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [..., in]` times the packed `weight [out, in]`: `[..., out]`."""
        return F.linear(x, weight, bias)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
        """`down(silu(gate(x)) * up(x))` for `x [..., in]`; `gate_up [2 * width, in]` holds the
        gate's rows, then up's; `bias [2 * width]` is theirs. All weights are packed."""
        gate, up = self.linear(x, gate_up, bias).chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, down)

    def argmax(self, values: Tensor) -> Tensor:
        """The lowest index of the largest of each row of `values [rows, n]`: `[rows] int32`."""
        return values.argmax(dim=-1).to(torch.int32)

    def constrain(self, logits: Tensor, bitmask: Tensor, masked: Tensor) -> Tensor:
        """`logits [rows, vocabulary]`, all of it on one rank, as `models.logits.constrain` says."""
        return constrained(logits, bitmask, masked, 0)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """A draw from each row of `logits [rows, vocabulary]`, all of it on one rank: `[rows]
        int32`, as `models.sampling.sample` says."""
        return self.argmax(choice_scores(logits, rows, 0, TensorParallel()))

    def causal_context(
        self,
        block_table: Tensor,
        grids: Sequence[Grid],
        page_size: int,
        context_pages: int,
        num_tokens: int,
    ) -> Context:
        """What `paged_attention` needs of a step: the grids' tokens one after the other, then
        padding up to `num_tokens`; `block_table [slots, pages] int32`, of which every row reads
        the first `context_pages`."""
        tables = block_table[:, :context_pages]
        return [causal_grid(tables[grid.slots], grid.positions, page_size) for grid in grids]

    def paged_attention(self, q: Tensor, kv: LayerKV, context: Context) -> Tensor:
        """`q [tokens, kv_heads, group, head_dim]` over `kv`'s pages: `[tokens, heads * dim]`."""
        return paged_attention(q, kv, context)

    def block_context(
        self,
        block_table: Tensor,
        slots: Tensor,
        lens: Tensor,
        block: int,
        page_size: int,
        context_pages: int,
    ) -> Context:
        """What `block_attention` needs: blocks `[rows, block]` of which row i sees the first
        `lens[i]` tokens in the pages of `slots[i]`; both `[rows] int32`."""
        table = block_table[slots][:, :context_pages]
        keys = torch.arange(table.shape[1] * page_size, device=lens.device, dtype=torch.int32)
        return table, keys < lens.unsqueeze(1)

    def block_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, context: Context
    ) -> Tensor:
        """`q [rows, block, kv_heads, group, head_dim]` over the context and the whole block,
        whose own `k`, `v [rows, block, kv_heads, head_dim]` are never paged:
        `[rows, block, heads * dim]`."""
        table, mask = context
        return block_attention(q, k, v, kv, table, mask)
