"""The target: a Llama-family causal LM with paged KV and capture of intermediate states."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from models.config import TargetConfig
from models.kv_cache import KVSpec, LayerKV
from models.layers import (
    DecoderLayer,
    Embedding,
    LMHead,
    decoder_stack,
    norm_weight,
    parameter,
    rms_norm,
)
from models.ops import Context, Ops
from models.parallel import TensorParallel, even_part
from models.rope import rope_table
from models.weights import CheckpointReader


@torch.compiler.nested_compile_region
def _paged_layer(
    layer: DecoderLayer,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: LayerKV,
    context: Context,
) -> Tensor:
    """The residual stream behind one layer; a region, so that layers are compiled only once."""
    q, k, v = layer.project(hidden, cos, sin)
    kv.write(slots, k, v)
    return layer.finish(hidden, layer.ops.paged_attention(q, kv, context))


class RunLayers(Protocol):
    """See `run_layers`."""

    def __call__(
        self,
        layers: Sequence[DecoderLayer],
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        kv: Sequence[LayerKV],
        context: Context,
    ) -> list[Tensor]: ...


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: Sequence[LayerKV],
    context: Context,
) -> list[Tensor]:
    """The residual stream behind each of a few layers. Not a method, so that one compiled form
    serves every group of layers."""
    stream = []
    for layer, layer_kv in zip(layers, kv, strict=True):
        hidden = _paged_layer(layer, hidden, cos, sin, slots, layer_kv, context)
        stream.append(hidden)
    return stream


class Vocabulary(nn.Module):
    """Both ends of a target on one rank, which its drafter shares: embedding and LM head."""

    def __init__(
        self,
        config: TargetConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        *,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        """Raises `CheckpointRefused` where the checkpoint lacks one of them or part of it."""
        super().__init__()
        self.ops = ops
        hidden = config.decoder.hidden_size
        name = "model.embed_tokens.weight"
        self.embed = Embedding(config.vocab_size, hidden, tp, reader, name, dtype)
        head = self.embed.weight
        if not config.tie_word_embeddings:
            rows = even_part(config.vocab_size, tp, dim=0)
            shape = (config.vocab_size, hidden)
            head = parameter(reader.read("lm_head.weight", rows, dtype, expect=shape))
        self.lm_head = LMHead(head, config.vocab_size, tp, ops)

    def pack(self) -> None:
        """Give the weights to the backend, once whoever borrows them has seen them."""
        self.lm_head.pack()


class Target(Vocabulary):
    """`LlamaForCausalLM` or, with per-head QK norm, `Qwen3ForCausalLM`: one rank of it."""

    def __init__(
        self,
        config: TargetConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        *,
        dtype: torch.dtype,
        num_positions: int,
        capture_layer_ids: Sequence[int] = (),
        ops: Ops,
    ) -> None:
        """`capture_layer_ids` are layers whose input is captured, ascending.

        Raises `CheckpointRefused` where the checkpoint lacks a tensor or part of one.
        """
        super().__init__(config, tp, reader, dtype=dtype, ops=ops)
        decoder = config.decoder
        self.eps = decoder.rms_norm_eps
        self.capture_layer_ids = tuple(capture_layer_ids)
        self.layers = decoder_stack(decoder, tp, reader, "model.layers", dtype, ops)
        self.norm = norm_weight(reader, "model.norm.weight", decoder.hidden_size, dtype)
        # Groups alike are compiled once; few, so that compiling one takes seconds.
        self.group_size = max(n for n in (1, 2, 3) if decoder.num_layers % n == 0)
        cos, sin = rope_table(decoder, num_positions)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    cos: Tensor
    sin: Tensor

    def kv_specs(self) -> list[KVSpec]:
        """What each layer keeps per token, in layer order."""
        return [layer.attention.kv_spec() for layer in self.layers]

    def pack(self) -> None:
        """See `Vocabulary.pack`."""
        for layer in self.layers:
            layer.pack()
        super().pack()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        context: Context,
        kv: Sequence[LayerKV],
        run: RunLayers = run_layers,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers, each writing KV for every token before any of them attends.

        token_ids, positions, slots `[tokens] int32`; context as `ops.causal_context` made it;
        `run` is `run_layers`, as a backend compiled it.
        Returns hidden states `[tokens, hidden]`, normed for the head, and `aux_hidden_states
        [tokens, captured * hidden]`: the residual stream *before* each captured layer.
        """
        hidden = self.embed(token_ids)
        cos, sin = self.cos[positions], self.sin[positions]
        stream = [hidden]
        for first in range(0, len(self.layers), self.group_size):
            group = slice(first, first + self.group_size)
            stream += run(self.layers[group], stream[-1], cos, sin, slots, kv[group], context)
        aux = [stream[i] for i in self.capture_layer_ids]
        captured = torch.cat(aux, dim=-1) if aux else hidden.new_empty(hidden.shape[0], 0)
        return rms_norm(stream[-1], self.norm, self.eps), captured

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits `[rows, local vocabulary]` of rows of `forward`'s hidden states."""
        return self.lm_head(hidden)
