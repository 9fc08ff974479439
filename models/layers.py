"""The decoder layer that target and drafter share, and the vocabulary-sharded ends of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import DecoderConfig
from models.kv_cache import KVSpec
from models.ops import Ops
from models.parallel import HeadLayout, Part, TensorParallel, even_part, head_layout, head_part
from models.rope import rotate
from models.weights import CheckpointReader


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention layer; the attention itself belongs to whoever calls it."""

    def __init__(
        self,
        decoder: DecoderConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        prefix: str,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.tp, self.ops = tp, ops
        self.eps, self.head_dim = decoder.rms_norm_eps, decoder.head_dim
        self.heads: HeadLayout = head_layout(decoder.num_heads, decoder.num_kv_heads, tp)
        query = head_part(self.heads.query_heads, decoder.head_dim, dim=0)
        kv = head_part(self.heads.kv_heads, decoder.head_dim, dim=0)
        hidden, query_size = decoder.hidden_size, decoder.num_heads * decoder.head_dim
        kv_size = decoder.num_kv_heads * decoder.head_dim
        stack = _Stack(
            (
                (f"{prefix}.q_proj", query_size, query),
                (f"{prefix}.k_proj", kv_size, kv),
                (f"{prefix}.v_proj", kv_size, kv),
            )
        )
        self.split = [query.size, kv.size, kv.size]
        self.qkv_weight = stack.weight(reader, hidden, dtype)
        self.qkv_bias = stack.bias(reader, dtype) if decoder.attention_bias else None
        output = head_part(self.heads.query_heads, decoder.head_dim, dim=1)
        self.o_weight = parameter(
            reader.read(f"{prefix}.o_proj.weight", output, dtype, expect=(hidden, query_size))
        )
        self.o_bias = (
            parameter(reader.read(f"{prefix}.o_proj.bias", None, dtype, expect=(hidden,)))
            if decoder.attention_bias
            else None
        )
        self.q_norm = self.k_norm = None
        if decoder.qk_norm:
            self.q_norm = norm_weight(reader, f"{prefix}.q_norm.weight", decoder.head_dim, dtype)
            self.k_norm = norm_weight(reader, f"{prefix}.k_norm.weight", decoder.head_dim, dtype)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated q `[..., kv_heads, group, head_dim]`, k and v `[..., kv_heads,
        head_dim]` of `x [..., hidden]` at the positions of `cos`, `sin` `[..., head_dim]`."""
        q, k, v = self.ops.linear(x, self.qkv_weight, self.qkv_bias).split(self.split, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.unflatten(-2, (len(self.heads.kv_heads), self.heads.group)), k, v

    def output(self, attended: Tensor) -> Tensor:
        """`[..., local query heads * head_dim]` -> `[..., hidden]`, summed over ranks."""
        out = self.tp.all_reduce(self.ops.linear(attended, self.o_weight))
        return out if self.o_bias is None else out + self.o_bias

    def kv_weight(self) -> Tensor:
        """This rank's K rows, then V rows, `[2 * kv_heads * head_dim, hidden]`."""
        return self.qkv_weight[self.split[0] :]

    def kv_bias(self) -> Tensor | None:
        return None if self.qkv_bias is None else self.qkv_bias[self.split[0] :]

    def kv_spec(self) -> KVSpec:
        return KVSpec(len(self.heads.kv_heads), self.head_dim, self.qkv_weight.dtype)

    def pack(self) -> None:
        """Give the weights to the backend; `kv_weight` has to be asked for before."""
        self.qkv_weight = parameter(self.ops.pack(self.qkv_weight))
        self.o_weight = parameter(self.ops.pack(self.o_weight))


class MLP(nn.Module):
    """SiLU-gated MLP, its width sharded over ranks."""

    def __init__(
        self,
        decoder: DecoderConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        prefix: str,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.tp, self.ops = tp, ops
        rows = even_part(decoder.intermediate_size, tp, dim=0)
        columns = even_part(decoder.intermediate_size, tp, dim=1)
        hidden, width = decoder.hidden_size, decoder.intermediate_size
        stack = _Stack(((f"{prefix}.gate_proj", width, rows), (f"{prefix}.up_proj", width, rows)))
        self.gate_up_weight = stack.weight(reader, hidden, dtype)
        self.down_weight = parameter(
            reader.read(f"{prefix}.down_proj.weight", columns, dtype, expect=(hidden, width))
        )
        self.gate_up_bias = self.down_bias = None
        if decoder.mlp_bias:
            self.gate_up_bias = stack.bias(reader, dtype)
            self.down_bias = parameter(
                reader.read(f"{prefix}.down_proj.bias", None, dtype, expect=(hidden,))
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`, summed over ranks."""
        out = self.tp.all_reduce(
            self.ops.gated_mlp(x, self.gate_up_weight, self.gate_up_bias, self.down_weight)
        )
        return out if self.down_bias is None else out + self.down_bias

    def pack(self) -> None:
        """Give the weights to the backend."""
        self.gate_up_weight = parameter(self.ops.pack(self.gate_up_weight))
        self.down_weight = parameter(self.ops.pack(self.down_weight))


class DecoderLayer(nn.Module):
    """A pre-norm layer in two halves, with the caller's attention between them."""

    def __init__(
        self,
        decoder: DecoderConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        prefix: str,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.ops, self.eps = ops, decoder.rms_norm_eps
        self.attention = Attention(decoder, tp, reader, f"{prefix}.self_attn", dtype, ops)
        self.mlp = MLP(decoder, tp, reader, f"{prefix}.mlp", dtype, ops)
        hidden = decoder.hidden_size
        self.input_norm = norm_weight(reader, f"{prefix}.input_layernorm.weight", hidden, dtype)
        self.mlp_norm = norm_weight(
            reader, f"{prefix}.post_attention_layernorm.weight", hidden, dtype
        )

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the residual stream `hidden [..., hidden]`; see `Attention.project`."""
        return self.attention.project(rms_norm(hidden, self.input_norm, self.eps), cos, sin)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after this layer."""
        hidden = hidden + self.attention.output(attended)
        return hidden + self.mlp(rms_norm(hidden, self.mlp_norm, self.eps))

    def pack(self) -> None:
        """Give the weights to the backend."""
        self.attention.pack()
        self.mlp.pack()


def decoder_stack(
    decoder: DecoderConfig,
    tp: TensorParallel,
    reader: CheckpointReader,
    prefix: str,
    dtype: torch.dtype,
    ops: Ops,
) -> Sequence[DecoderLayer]:
    """The layers `prefix.0 ..` as a registered submodule that knows what it holds."""
    layers = nn.ModuleList(
        DecoderLayer(decoder, tp, reader, f"{prefix}.{i}", dtype, ops)
        for i in range(decoder.num_layers)
    )
    return cast("Sequence[DecoderLayer]", layers)


class Embedding(nn.Module):
    """Token embedding, its vocabulary sharded over ranks."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        reader: CheckpointReader,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        rows = even_part(vocab_size, tp, dim=0)
        self.weight = parameter(reader.read(name, rows, dtype, expect=(vocab_size, hidden_size)))
        self.register_buffer(
            "start", torch.tensor(tp.rank * self.weight.shape[0], dtype=torch.int32)
        )

    start: Tensor

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[...] int32` ids in `[0, vocab_size)` -> `[..., hidden]`, the same on every rank."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.tp.all_reduce(rows * mine.unsqueeze(-1))


class LMHead(nn.Module):
    """Vocabulary-sharded head; logits stay on the rank that computed them."""

    def __init__(self, weight: Tensor, vocab_size: int, tp: TensorParallel, ops: Ops) -> None:
        """`weight [ceil(vocab_size / tp.size), hidden]` is this rank's part (tied: the
        embedding's)."""
        super().__init__()
        self.tp, self.ops = tp, ops
        self.vocab_size = vocab_size
        self.weight = weight
        width = weight.shape[0]
        first = torch.tensor(tp.rank * width, dtype=torch.int32)
        self.register_buffer("start", first)
        ids = first + torch.arange(width, dtype=torch.int32)
        self.register_buffer("padded", ids >= vocab_size)

    start: Tensor
    padded: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` -> this rank's logits `[rows, local vocabulary]`, padding at -inf."""
        logits = self.ops.linear(hidden, self.weight)
        if self.vocab_size % self.tp.size == 0:
            return logits
        return logits.masked_fill(self.padded, float("-inf"))

    def pack(self) -> None:
        """Give the weight to the backend; a tied embedding keeps its own."""
        self.weight = parameter(self.ops.pack(self.weight))


def parameter(values: Tensor) -> nn.Parameter:
    """A weight that is never trained here."""
    return nn.Parameter(values, requires_grad=False)


def norm_weight(reader: CheckpointReader, name: str, size: int, dtype: torch.dtype) -> nn.Parameter:
    """The weight `[size]` of a norm, whole on every rank."""
    return parameter(reader.read(name, None, dtype, expect=(size,)))


@dataclass(frozen=True, slots=True)
class _Stack:
    """Projections of one input as one matrix: one matmul instead of two or three.

    `members` are `(name, rows in the checkpoint, this rank's part of them)`.
    """

    members: tuple[tuple[str, int, Part], ...]

    def weight(self, reader: CheckpointReader, columns: int, dtype: torch.dtype) -> nn.Parameter:
        parts = [
            reader.read(f"{name}.weight", part, dtype, expect=(rows, columns))
            for name, rows, part in self.members
        ]
        return parameter(torch.cat(parts))

    def bias(self, reader: CheckpointReader, dtype: torch.dtype) -> nn.Parameter:
        parts = [
            reader.read(f"{name}.bias", part, dtype, expect=(rows,))
            for name, rows, part in self.members
        ]
        return parameter(torch.cat(parts))
