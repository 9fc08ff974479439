"""The DFlash drafter: projects target states into its KV cache and drafts a block in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.config import DrafterConfig
from models.config_fields import CheckpointRefused
from models.kv_cache import KVSpec, LayerKV
from models.layers import DecoderLayer, LMHead, decoder_stack, norm_weight, parameter, rms_norm
from models.ops import Context
from models.parallel import TensorParallel, even_part
from models.rope import rope_table, rotate
from models.sampler import greedy
from models.target import Vocabulary
from models.weights import CheckpointReader

# What a checkpoint may hold beside the drafter: copies of what is borrowed from the target.
_BORROWED = frozenset(
    {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d"}
)


class DFlashDrafter(nn.Module):
    """One rank of a DFlash drafter; embedding and LM head are the target's."""

    def __init__(
        self,
        config: DrafterConfig,
        tp: TensorParallel,
        reader: CheckpointReader,
        target: Vocabulary,
        *,
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        """Rotary tables reach `block_size` past `num_positions`: a block may end beyond it.

        Raises `CheckpointRefused` for a missing tensor, or one that is no part of DFlash.
        """
        super().__init__()
        decoder = config.decoder
        self.config, self.tp, self.eps = config, tp, decoder.rms_norm_eps
        self.ops = target.ops
        self.embed = target.embed
        rows = even_part(decoder.hidden_size, tp, dim=0)
        hidden = decoder.hidden_size
        columns = len(config.capture_layer_ids) * config.target_hidden_size
        self.fc = parameter(reader.read("fc.weight", rows, dtype, expect=(hidden, columns)))
        self.hidden_norm = norm_weight(reader, "hidden_norm.weight", hidden, dtype)
        self.layers = decoder_stack(decoder, tp, reader, "layers", dtype, self.ops)
        self.norm = norm_weight(reader, "norm.weight", hidden, dtype)
        self.mask_embedding = _mask_embedding(reader, decoder.hidden_size, dtype)
        self.lm_head, self.draft_to_target = _head(config, tp, reader, target, dtype)
        cos, sin = rope_table(decoder, num_positions + config.block_size)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.fused_kv_weight: Tensor | None = None
        self.fused_kv_bias: Tensor | None = None
        self.fused_k_norm: Tensor | None = None
        if self.draft_to_target is None:
            _check_copy(reader, "lm_head.weight", target.lm_head.weight, config, tp)
        _check_copy(reader, "embed_tokens.weight", target.embed.weight, config, tp)
        _refuse_unknown(reader)

    cos: Tensor
    sin: Tensor

    def kv_specs(self) -> list[KVSpec]:
        """What each draft layer keeps per context token, in layer order."""
        return [layer.attention.kv_spec() for layer in self.layers]

    def bind(self) -> None:
        """Stack this rank's K and V projections of all layers for `inject`'s single matmul.

        `fused_kv_weight [layers * 2 * kv_heads * head_dim, hidden]`, K before V in each layer.
        """
        attentions = [layer.attention for layer in self.layers]
        self.fused_kv_weight = torch.cat([a.kv_weight() for a in attentions])
        biases = [bias for a in attentions if (bias := a.kv_bias()) is not None]
        self.fused_kv_bias = torch.cat(biases) if biases else None
        self.fused_k_norm = torch.stack([a.k_norm for a in attentions if a.k_norm is not None])

    def pack(self) -> None:
        """Give the weights to the backend, after `bind`. A borrowed head is the target's to
        pack."""
        assert self.fused_kv_weight is not None, "bind() first"
        for layer in self.layers:
            layer.pack()
        self.fc = parameter(self.ops.pack(self.fc))
        self.fused_kv_weight = self.ops.pack(self.fused_kv_weight)
        if self.draft_to_target is not None:
            self.lm_head.pack()

    def inject(self, aux: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[LayerKV]) -> None:
        """Project captured target states into every draft layer's pages.

        aux `[tokens, captured * hidden]`; positions, slots `[tokens] int32` (rejected tokens point
        at page 0). `fc` is column-sharded: each rank projects its slice, the slices are gathered.
        """
        assert self.fused_kv_weight is not None, "bind() first"
        assert self.fused_k_norm is not None
        hidden_size = self.hidden_norm.shape[0]
        context = self.tp.all_gather(self.ops.linear(aux, self.fc), dim=-1)[:, :hidden_size]
        context = rms_norm(context, self.hidden_norm, self.eps)
        fused = self.ops.linear(context, self.fused_kv_weight, self.fused_kv_bias)
        head_dim = self.config.decoder.head_dim
        # [tokens, layers, K or V, kv_heads, head_dim]
        fused = fused.unflatten(-1, (len(self.layers), 2, -1, head_dim))
        keys = rms_norm(fused[:, :, 0], self.fused_k_norm.unsqueeze(1), self.eps)
        cos, sin = self.cos[positions], self.sin[positions]
        keys = rotate(keys, cos.unsqueeze(1), sin.unsqueeze(1))
        for i, layer_kv in enumerate(kv):
            layer_kv.write(slots, keys[:, i], fused[:, i, 1])

    def block_hidden(
        self,
        token_ids: Tensor,
        context_lens: Tensor,
        context: Context,
        kv: Sequence[LayerKV],
    ) -> Tensor:
        """Hidden states `[rows, block, hidden]` of query blocks, normed for the head.

        token_ids `[rows, block] int32`, at positions `context_lens ..`; context_lens `[rows]`
        int32 counts the injected tokens a row may see; context as `ops.block_context` made it.
        """
        block = token_ids.shape[1]
        offsets = torch.arange(block, device=token_ids.device, dtype=torch.int32)
        positions = context_lens.unsqueeze(1) + offsets
        cos, sin = self.cos[positions], self.sin[positions]
        hidden = self.embed(token_ids)
        if self.mask_embedding is not None:
            masked = (token_ids == self.config.mask_token_id).unsqueeze(-1)
            hidden = torch.where(masked, self.mask_embedding, hidden)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = _block_layer(layer, hidden, cos, sin, layer_kv, context)
        return rms_norm(hidden, self.norm, self.eps)

    def draft_logits(self, hidden: Tensor, num_drafts: int) -> Tensor:
        """This rank's logits `[rows, num_drafts, local vocabulary]` of the first drafts in
        `block_hidden`'s states; the bonus token's place has none."""
        masks = hidden[:, 1 : 1 + num_drafts]
        return self.lm_head(masks.flatten(0, 1)).unflatten(0, masks.shape[:2])

    def draft_tokens(self, logits: Tensor) -> Tensor:
        """Greedy drafts `[rows, num_drafts] int32`, target ids, from `draft_logits`."""
        ids = greedy(logits.flatten(0, 1), self.lm_head)
        if self.draft_to_target is not None:
            ids = self.draft_to_target[ids]
        return ids.view(logits.shape[:2])


@torch.compiler.nested_compile_region
def _block_layer(
    layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, context: Context
) -> Tensor:
    """The residual stream behind one draft layer; a region, so that it is compiled only once."""
    q, k, v = layer.project(hidden, cos, sin)
    return layer.finish(hidden, layer.ops.block_attention(q, k, v, kv, context))


def _head(
    config: DrafterConfig,
    tp: TensorParallel,
    reader: CheckpointReader,
    target: Vocabulary,
    dtype: torch.dtype,
) -> tuple[LMHead, Tensor | None]:
    """The target's head, or for a reduced vocabulary the drafter's own with its id map.

    `d2t [draft_vocab_size]` holds target id minus draft id. Raises `CheckpointRefused` where a map
    leads outside the target's vocabulary.
    """
    if config.draft_vocab_size == config.vocab_size:
        return target.lm_head, None
    offsets = reader.read("d2t", None, torch.int64, expect=(config.draft_vocab_size,))
    ids = offsets + torch.arange(config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointRefused(
            f"{reader.directory}: d2t maps {int(ids.min())}..{int(ids.max())}, the target's "
            f"vocabulary is 0..{config.vocab_size - 1}"
        )
    rows = even_part(config.draft_vocab_size, tp, dim=0)
    shape = (config.draft_vocab_size, config.decoder.hidden_size)
    weight = parameter(reader.read("lm_head.weight", rows, dtype, expect=shape))
    return LMHead(weight, config.draft_vocab_size, tp, target.ops), ids.to(torch.int32)


def _check_copy(
    reader: CheckpointReader, name: str, borrowed: Tensor, config: DrafterConfig, tp: TensorParallel
) -> None:
    """Refuse a drafter that brings its own head or embedding: the target's are what it gets.

    `borrowed` is this rank's part. Copies of the target's are common and harmless.
    """
    if name not in reader.names:
        return
    shape = (config.vocab_size, config.decoder.hidden_size)
    own = reader.read(name, even_part(config.vocab_size, tp, dim=0), borrowed.dtype, expect=shape)
    if not torch.equal(own, borrowed):
        raise CheckpointRefused(
            f"{reader.directory}: {name} differs from the target's; drafters with a trained head "
            f"or embedding of their own are not supported"
        )


def _mask_embedding(
    reader: CheckpointReader, hidden_size: int, dtype: torch.dtype
) -> nn.Parameter | None:
    """A trained mask embedding `[hidden]` that stands beside the weights, where there is one.

    Raises `CheckpointRefused` where the file does not hold one tensor of that size.
    """
    path = reader.directory / "mask_embedding.pt"
    if not path.is_file():
        return None
    values = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(values, Tensor) or values.numel() != hidden_size:
        raise CheckpointRefused(f"{path}: not a tensor of {hidden_size} values")
    return parameter(values.reshape(hidden_size).to(dtype))


def _refuse_unknown(reader: CheckpointReader) -> None:
    """A tensor nobody asked for means the drafter computes something we don't."""
    unknown = sorted(reader.names - reader.names_read - _BORROWED - {"lm_head.weight", "d2t"})
    if unknown:
        raise CheckpointRefused(
            f"{reader.directory}: {unknown[0]} (and {len(unknown) - 1} more tensors) is no part "
            f"of a DFlash drafter; DFlash 2, Domino and similar drafters are not supported"
        )
