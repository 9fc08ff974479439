"""What a checkpoint's config.json says, checked and reduced to what the engine computes with.

Torch-free: a target/drafter pairing is judged before any process is placed or weight is read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from models.config_fields import CheckpointRefused, Fields

logger = logging.getLogger(__name__)

DraftFormat = Literal["z-lab", "speculators"]

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
DRAFTER_ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")

# Checkpoints that look like DFlash and compute something else; running them as DFlash would
# half-work, so each is refused by the name its users know it by.
_OTHER_DRAFTERS = {
    "dflash2": "DFlash 2",
    "domino": "Domino",
    "dspark": "DSpark",
    "jetspec": "JetSpec",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model.

    `kind` is `default`, `linear`, `llama3` or `yarn`; `parameters` holds that kind's own numbers
    under the names Hugging Face configs use (`factor`, `low_freq_factor`, ...).
    """

    kind: str
    theta: float
    parameters: Mapping[str, float | bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The geometry of a stack of pre-norm decoder layers; target and drafter both have one."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """A target checkpoint. `dtype` is the one its weights are stored in."""

    architecture: str
    decoder: DecoderConfig
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A DFlash drafter checkpoint; `architecture` is its name in `models.registry`.

    `capture_layer_ids` are the target layers whose *input* is captured: z-lab's
    `target_layer_ids` plus one (design document, "Target Auxiliary Hidden State Extraction").
    `num_target_layers` is None where the checkpoint does not say.
    """

    architecture: str
    format: DraftFormat
    decoder: DecoderConfig
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int | None
    block_size: int
    mask_token_id: int
    capture_layer_ids: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Drafts per step, K = block_size - 1: one slot of the block holds the bonus token."""
        return self.block_size - 1


def reduced(
    target: TargetConfig, drafter: DrafterConfig | None, num_layers: int
) -> tuple[TargetConfig, DrafterConfig | None]:
    """The pair with only the target's first `num_layers`, for profiling a step.

    Where the drafter would capture layers that are gone, it captures as many at even distances:
    its drafts, and the acceptance they meet, then mean nothing. Raises `CheckpointRefused` where
    there are more layers asked for than exist, or too few to capture from.
    """
    full = target.decoder.num_layers
    if num_layers > full:
        raise CheckpointRefused(f"profile_num_layers is {num_layers}, the target has {full} layers")
    logger.warning(
        "profiling: %d of the target's %d layers; its text and acceptance are not meaningful",
        num_layers,
        full,
    )
    target = replace(target, decoder=replace(target.decoder, num_layers=num_layers))
    if drafter is None or max(drafter.capture_layer_ids) < num_layers:
        return target, drafter
    count = len(drafter.capture_layer_ids)
    if count > num_layers:
        raise CheckpointRefused(
            f"profile_num_layers is {num_layers}, the drafter captures {count} layers"
        )
    spaced = tuple((i + 1) * num_layers // count - 1 for i in range(count))
    return target, replace(drafter, capture_layer_ids=spaced)


def load_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json (and generation_config.json for its end tokens).

    Raises `CheckpointRefused` naming the field where the model is not one we run.
    """
    fields = Fields.read(directory / "config.json")
    architecture = _architecture(fields, TARGET_ARCHITECTURES, "a supported target")
    if "quantization_config" in fields:
        raise fields.refuse("quantization_config is set; only float weights load")
    _refuse_sliding_window(fields)
    return TargetConfig(
        architecture=architecture,
        decoder=_decoder(fields, qk_norm=architecture == "Qwen3ForCausalLM"),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(fields, directory),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )


def load_drafter_config(directory: Path) -> DrafterConfig:
    """Read a DFlash drafter's config.json, z-lab or speculators format.

    Raises `CheckpointRefused` naming what is missing, or the variant we don't run.
    """
    fields = Fields.read(directory / "config.json")
    if "speculators_config" in fields or "speculators_model_type" in fields:
        return _speculators_drafter(fields)
    return _zlab_drafter(fields)


def check_pairing(
    target: TargetConfig, drafter: DrafterConfig, num_speculative_tokens: int
) -> None:
    """Refuse a drafter that was not made for this target, naming both values.

    Raises `CheckpointRefused`.
    """
    layers = target.decoder.num_layers
    checks = (
        ("hidden size", drafter.target_hidden_size, target.decoder.hidden_size),
        ("vocabulary size", drafter.vocab_size, target.vocab_size),
        ("number of target layers", drafter.num_target_layers or layers, layers),
    )
    for what, expected, found in checks:
        if expected != found:
            raise CheckpointRefused(
                f"the drafter was made for a target with {what} {expected}, this target has {found}"
            )
    # The drafter borrows the target's embedding and head, so it works in the target's width.
    if drafter.decoder.hidden_size != target.decoder.hidden_size:
        raise CheckpointRefused(
            f"the drafter's hidden size is {drafter.decoder.hidden_size}, the target's is "
            f"{target.decoder.hidden_size}; they must be equal to share embedding and head"
        )
    # Said in the checkpoint's own numbers: z-lab counts outputs, speculators inputs of layers.
    name, shift = (
        ("target_layer_ids", 1) if drafter.format == "z-lab" else ("aux_hidden_state_layer_ids", 0)
    )
    for layer in drafter.capture_layer_ids:
        if not 1 <= layer <= layers - 1:
            raise CheckpointRefused(
                f"{name} holds {layer - shift}, the target's {layers} layers allow "
                f"{1 - shift} to {layers - 1 - shift}"
            )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise CheckpointRefused(
            f"mask_token_id {drafter.mask_token_id} is outside the target's vocabulary of "
            f"{target.vocab_size}"
        )
    if num_speculative_tokens != drafter.num_drafts:
        raise CheckpointRefused(
            f"num_speculative_tokens is {num_speculative_tokens}, the drafter's block_size "
            f"{drafter.block_size} needs {drafter.num_drafts}"
        )


_DFLASH_FIELDS = frozenset(
    {
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "num_target_layers",
        "target_hidden_size",
        "target_layer_ids",
        # Checked, and refused where they are set, by `_refuse_variants`.
        "attention_sink_bias",
        "causal",
        "projector_type",
        "sample_from_anchor",
        "shift_label",
        "swa_window_size",
        "use_swa",
    }
)


def _zlab_drafter(fields: Fields) -> DrafterConfig:
    nested = fields.nested("dflash_config")
    merged = nested.over(fields)
    _refuse_variants(merged)
    unknown = sorted(nested.names - _DFLASH_FIELDS)
    if unknown:
        raise fields.refuse(
            f"dflash_config.{unknown[0]} is not known, and may change what the drafter computes"
        )
    _architecture(fields, DRAFTER_ARCHITECTURES, "a DFlash drafter")
    vocab_size = fields.integer("vocab_size")
    decoder = _decoder(fields, qk_norm=True)
    return DrafterConfig(
        architecture=DRAFTER_ARCHITECTURES[0],
        format="z-lab",
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=merged.integer("draft_vocab_size", vocab_size),
        target_hidden_size=merged.integer("target_hidden_size", decoder.hidden_size),
        num_target_layers=(
            merged.integer("num_target_layers") if "num_target_layers" in merged else None
        ),
        block_size=merged.integer("block_size", least=2),
        mask_token_id=merged.integer("mask_token_id", least=0),
        capture_layer_ids=tuple(i + 1 for i in _layer_ids(merged, "target_layer_ids")),
    )


def _speculators_drafter(fields: Fields) -> DrafterConfig:
    if "transformer_layer_config" not in fields:
        raise fields.refuse("transformer_layer_config is missing")
    layers = fields.nested("transformer_layer_config")
    _refuse_variants(fields.over(layers))
    kind = fields.text("speculators_model_type", "dflash")
    if kind != "dflash":
        raise fields.refuse(f"speculators_model_type {kind!r} is not 'dflash'")
    decoder = _decoder(layers, qk_norm=True)
    vocab_size = layers.integer("vocab_size")
    return DrafterConfig(
        architecture=DRAFTER_ARCHITECTURES[0],
        format="speculators",
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size),
        num_target_layers=None,
        block_size=fields.integer("block_size", least=2),
        mask_token_id=fields.integer("mask_token_id", least=0),
        capture_layer_ids=_layer_ids(fields, "aux_hidden_state_layer_ids"),
    )


def _refuse_variants(fields: Fields) -> None:
    """Refuse, by name, drafters whose computation differs from DFlash's."""
    names = [fields.text("speculators_model_type", ""), fields.text("projector_type", "")]
    for name in (*names, *fields.texts("architectures")):
        for prefix, label in _OTHER_DRAFTERS.items():
            if prefix in name.lower().replace("_", "").replace("-", ""):
                raise fields.refuse(f"this is a {label} drafter ({name}), not DFlash")
    _refuse_sliding_window(fields)
    if fields.flag("use_swa"):
        raise fields.refuse(
            "sliding-window drafters are not supported (use_swa is true, swa_window_size is "
            f"{fields.get('swa_window_size')})"
        )
    for key, label in (
        ("causal", "causal drafters are not supported"),
        ("is_causal", "causal drafters are not supported"),
        ("attention_sink_bias", "attention sinks are not supported"),
        ("add_swa_attention_sink_bias", "attention sinks are not supported"),
        ("sample_from_anchor", "drafters that sample from the bonus position are not supported"),
        ("shift_label", "drafters with shifted labels are not supported"),
    ):
        if fields.flag(key):
            raise fields.refuse(f"{label} ({key} is true)")


def _refuse_sliding_window(fields: Fields) -> None:
    kinds = set(fields.texts("layer_types"))
    if fields.flag("use_sliding_window"):
        kinds.add("sliding_attention")
    other = sorted(kinds - {"full_attention"})
    if other:
        raise fields.refuse(
            f"layers of kind {', '.join(other)} are not supported, only full_attention "
            f"(sliding_window is {fields.get('sliding_window')})"
        )


def _decoder(fields: Fields, *, qk_norm: bool) -> DecoderConfig:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse(f"hidden_act {activation!r} is not supported, 'silu' is")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    return DecoderConfig(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=qk_norm,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
    )


_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}
_ROPE_OPTIONAL_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
}


def _rope(fields: Fields) -> RopeConfig:
    """theta stands beside or inside `rope_parameters` / `rope_scaling`, whichever exists."""
    scaling = fields.nested("rope_parameters").over(fields.nested("rope_scaling"))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _ROPE_NUMBERS:
        supported = ", ".join(_ROPE_NUMBERS)
        raise fields.refuse(f"rope type {kind!r} is not supported; supported: {supported}")
    for place in (scaling, fields):
        if place.number("partial_rotary_factor", 1.0) != 1:
            raise fields.refuse("partial_rotary_factor other than 1 is not supported")
    missing = [name for name in _ROPE_NUMBERS[kind] if name not in scaling]
    if missing:
        raise fields.refuse(f"rope type {kind!r} lacks {', '.join(missing)}")
    names = _ROPE_NUMBERS[kind] + _ROPE_OPTIONAL_NUMBERS.get(kind, ())
    parameters: dict[str, float | bool] = {
        name: scaling.number(name, 1.0) for name in names if name in scaling
    }
    if kind == "yarn" and "truncate" in scaling:
        parameters["truncate"] = scaling.flag("truncate")
    return RopeConfig(
        kind=kind,
        theta=scaling.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        parameters=parameters,
    )


def _eos_token_ids(fields: Fields, directory: Path) -> tuple[int, ...]:
    """generation_config.json overrides config.json, as in transformers' `generate`."""
    path = directory / "generation_config.json"
    if path.is_file() and "eos_token_id" in (generation := Fields.read(path)):
        return generation.integers("eos_token_id")
    return fields.integers("eos_token_id")


def _architecture(fields: Fields, supported: tuple[str, ...], what: str) -> str:
    names = fields.texts("architectures")
    if len(names) != 1 or names[0] not in supported:
        raise fields.refuse(
            f"architectures is {list(names)}, which is not {what}; "
            f"supported: {', '.join(supported)}"
        )
    return names[0]


def _layer_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.integers(name)
    if not ids:
        raise fields.refuse(f"{name} is missing, and it can't be guessed")
    if not isinstance(fields.get(name), list):
        raise fields.refuse(f"{name} is {ids[0]}, not a list")
    if list(ids) != sorted(set(ids)):
        raise fields.refuse(f"{name} {list(ids)} is not strictly ascending")
    return ids
