"""The target: a Llama-family causal LM with paged KV and capture of intermediate states."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.attention import Grid, paged_attention
from models.config import TargetConfig
from models.kv_cache import KVSpec, LayerKV
from models.layers import Embedding, LMHead, decoder_stack, norm_weight, parameter, rms_norm
from models.parallel import TensorParallel, even_part
from models.rope import rope_table
from models.weights import CheckpointReader


class Target(nn.Module):
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
    ) -> None:
        """`capture_layer_ids` are layers whose input is captured, ascending.

        Raises `CheckpointRefused` where the checkpoint lacks a tensor or part of one.
        """
        super().__init__()
        decoder = config.decoder
        self.eps = decoder.rms_norm_eps
        self.capture_layer_ids = tuple(capture_layer_ids)
        embed_name = "model.embed_tokens.weight"
        self.embed = Embedding(
            config.vocab_size, decoder.hidden_size, tp, reader, embed_name, dtype
        )
        self.layers = decoder_stack(decoder, tp, reader, "model.layers", dtype)
        self.norm = norm_weight(reader, "model.norm.weight", decoder.hidden_size, dtype)
        head = self.embed.weight
        if not config.tie_word_embeddings:
            rows = even_part(config.vocab_size, tp, dim=0)
            shape = (config.vocab_size, decoder.hidden_size)
            head = parameter(reader.read("lm_head.weight", rows, dtype, expect=shape))
        self.lm_head = LMHead(head, config.vocab_size, tp)
        cos, sin = rope_table(decoder, num_positions)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    cos: Tensor
    sin: Tensor

    def kv_specs(self) -> list[KVSpec]:
        """What each layer keeps per token, in layer order."""
        return [layer.attention.kv_spec() for layer in self.layers]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        grids: list[Grid],
        kv: Sequence[LayerKV],
    ) -> tuple[Tensor, Tensor]:
        """Run all layers, writing KV for every token before any of them attends.

        token_ids, positions, slots `[tokens] int32`; grids partition the tokens in order. Returns
        the residual stream after the last layer `[tokens, hidden]` (not normed; see `logits`) and
        `aux_hidden_states [tokens, captured * hidden]`, each captured *before* its layer.
        """
        hidden = self.embed(token_ids)
        cos, sin = self.cos[positions], self.sin[positions]
        aux = []
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            if i in self.capture_layer_ids:
                aux.append(hidden)
            q, k, v = layer.project(hidden, cos, sin)
            layer_kv.write(slots, k, v)
            hidden = layer.finish(hidden, paged_attention(q, layer_kv, grids))
        return hidden, torch.cat(aux, dim=-1) if aux else hidden.new_empty(hidden.shape[0], 0)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits `[rows, local vocabulary]` of residual-stream rows."""
        return self.lm_head(rms_norm(hidden, self.norm, self.eps))
