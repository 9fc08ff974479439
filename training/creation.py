"""A new drafter, made of its target: a checkpoint that loads like any other."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.config import TargetConfig, load_target_config
from models.layers import DecoderLayer
from models.target import Target
from training.features import capture
from training.recipe import Recipe, TrainingRefused

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_NUM_CAPTURES = 5
# Parameters of a layer and what checkpoints call them; the others are stacked.
_PLAIN = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "attention.o_weight": "self_attn.o_proj.weight",
    "attention.o_bias": "self_attn.o_proj.bias",
    "mlp.down_weight": "mlp.down_proj.weight",
}
# Tokens over which the target's heads are measured.
_MEASURED_TOKENS = 2048


def spread_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Five layers from the second to the third last, evenly spaced; all of them where there are
    fewer. They are in z-lab's numbering: the outputs of these layers."""
    last = num_target_layers - 3
    if last < _NUM_CAPTURES:
        return tuple(range(max(1, num_target_layers - 1)))
    return tuple(round(1 + i * (last - 1) / (_NUM_CAPTURES - 1)) for i in range(_NUM_CAPTURES))


def unused_token(num_tokens: int, vocab_size: int, added: Sequence[int], seen: set[int]) -> int:
    """A token to mask with: the first that the tokenizer does not have, or the last of its `added`
    ones that is not `seen` in the data. Raises `TrainingRefused` where there is none."""
    if num_tokens < vocab_size:
        return num_tokens
    for token in sorted(added, reverse=True):
        if token < vocab_size and token not in seen:
            return token
    raise TrainingRefused("every special token occurs in the data; give --mask-token-id")


def create_drafter(
    directory: Path,
    target_dir: Path,
    target: Target,
    recipe: Recipe,
    sequences: Sequence[Sequence[int]],
) -> None:
    """Write a drafter for `target` in z-lab format.

    Its layers are the target's before the last, `fc` reads the last captured state, and the norms
    of its queries and keys have the scale that the target's heads have on `sequences`. `recipe`
    has every choice made. Raises `TrainingRefused` for one that does not fit the target.
    """
    config = load_target_config(target_dir)
    num_target_layers = config.decoder.num_layers
    if recipe.num_layers >= num_target_layers:
        raise TrainingRefused(
            f"num_layers is {recipe.num_layers}, the target's {num_target_layers} layers allow at "
            f"most {num_target_layers - 1}"
        )
    if not all(0 <= i <= num_target_layers - 2 for i in recipe.target_layer_ids):
        raise TrainingRefused(
            f"target_layer_ids is {list(recipe.target_layer_ids)}, the target's "
            f"{num_target_layers} layers allow 0 to {num_target_layers - 2}"
        )
    first = num_target_layers - 1 - recipe.num_layers
    layers = target.layers[first : first + recipe.num_layers]
    scales = _head_scales(target, first, recipe.num_layers, sequences)
    weights: dict[str, Tensor] = {}
    for i, (layer, (q_scale, k_scale)) in enumerate(zip(layers, scales, strict=True)):
        values: dict[str, Tensor] = {name: w.detach() for name, w in layer.named_parameters()}
        if layer.attention.q_norm is None:
            head_dim = layer.attention.head_dim
            values["attention.q_norm"] = torch.full((head_dim,), q_scale)
            values["attention.k_norm"] = torch.full((head_dim,), k_scale)
        weights |= {f"layers.{i}.{name}": w for name, w in unstacked(layer, values).items()}
    hidden = config.decoder.hidden_size
    fc = torch.zeros(hidden, len(recipe.target_layer_ids) * hidden)
    fc[:, -hidden:] = torch.eye(hidden)
    weights["fc.weight"] = fc
    nearest = target.layers[min(max(recipe.target_layer_ids) + 1, num_target_layers - 1)]
    weights["hidden_norm.weight"] = nearest.input_norm
    weights["norm.weight"] = target.norm
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, drafter_config(target_dir, config, recipe))
    save_file(
        {name: w.detach().float().cpu().contiguous() for name, w in weights.items()},
        directory / "model.safetensors",
    )


def drafter_config(target_dir: Path, target: TargetConfig, recipe: Recipe) -> dict[str, Any]:
    """The z-lab config.json of a drafter with the target's own width and heads."""
    decoder = target.decoder
    raw = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": decoder.attention_bias,
        "attention_dropout": 0.0,
        "block_size": recipe.block_size,
        "dflash_config": {
            "mask_token_id": recipe.mask_token_id,
            "target_layer_ids": list(recipe.target_layer_ids),
        },
        "dtype": "float32",
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": decoder.intermediate_size,
        "layer_types": ["full_attention"] * recipe.num_layers,
        "max_position_embeddings": decoder.max_position_embeddings,
        "max_window_layers": recipe.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_hidden_layers": recipe.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "num_target_layers": decoder.num_layers,
        "rms_norm_eps": decoder.rms_norm_eps,
        **{name: raw[name] for name in _ROPE_FIELDS if name in raw},
        "sliding_window": None,
        "tie_word_embeddings": target.tie_word_embeddings,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }


def write_config(directory: Path, config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def unstacked(layer: DecoderLayer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`values` of a layer's parameters, named as the layer names them, under the names and in the
    pieces that checkpoints have.

    Biases of an MLP are left out: DFlash's layers have none.
    """
    weights: dict[str, Tensor] = {}
    for name, plain in _PLAIN.items():
        if name in values:
            weights[plain] = values[name]
    for kind in ("weight", "bias"):
        if f"attention.qkv_{kind}" in values:
            parts = values[f"attention.qkv_{kind}"].split(layer.attention.split)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                weights[f"self_attn.{name}.{kind}"] = part
    gate, up = values["mlp.gate_up_weight"].chunk(2)
    return weights | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


@torch.no_grad()
def _head_scales(
    target: Target, first: int, count: int, sequences: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Root mean square of the queries and keys of `count` layers from `first` on."""
    ids, measured = target.capture_layer_ids, 0
    squares = torch.zeros(count, 2, dtype=torch.float64)
    target.capture_layer_ids = tuple(range(first, first + count))
    try:
        for tokens in sequences:
            inputs = capture(target, tokens, 0).aux.chunk(count, dim=-1)
            length = len(inputs[0])
            cos, sin = target.cos[:length], target.sin[:length]
            for i, hidden in enumerate(inputs):
                q, k, _ = target.layers[first + i].project(hidden, cos, sin)
                squares[i] += torch.stack([x.double().square().mean() for x in (q, k)]).cpu()
            measured += 1
            if measured * length >= _MEASURED_TOKENS:
                break
    finally:
        target.capture_layer_ids = ids
    scales = (squares / max(1, measured)).sqrt()
    return [(float(q), float(k)) for q, k in scales]
