"""What a checkpoint's config.json says, checked and reduced to what the engine computes with.

Torch-free: a target/drafter pairing is judged before any process is placed or weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


class CheckpointRefused(ValueError):
    """A checkpoint, or a pairing of two, that this engine can't run exactly as trained."""


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


def load_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json (and generation_config.json for its end tokens).

    Raises `CheckpointRefused` naming the field where the model is not one we run.
    """
    raw = _read_json(directory / "config.json")
    architecture = _architecture(raw, directory)
    if architecture not in TARGET_ARCHITECTURES:
        raise CheckpointRefused(
            f"{directory}: architecture {architecture!r} is not supported as a target; "
            f"supported: {', '.join(TARGET_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise CheckpointRefused(f"{directory}: quantization_config is set; only float weights load")
    _refuse_sliding_window(raw, directory)
    return TargetConfig(
        architecture=architecture,
        decoder=_decoder(raw, directory, qk_norm=architecture == "Qwen3ForCausalLM"),
        vocab_size=_int(raw, "vocab_size", directory),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(raw, directory),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def load_drafter_config(directory: Path) -> DrafterConfig:
    """Read a DFlash drafter's config.json, z-lab or speculators format.

    Raises `CheckpointRefused` naming what is missing, or the variant we don't run.
    """
    raw = _read_json(directory / "config.json")
    if "speculators_config" in raw or "speculators_model_type" in raw:
        return _speculators_drafter(raw, directory)
    return _zlab_drafter(raw, directory)


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
    for layer in drafter.capture_layer_ids:
        if not 1 <= layer <= layers - 1:
            raise CheckpointRefused(
                f"target_layer_ids holds {layer - 1}, the target's {layers} layers allow "
                f"0 to {layers - 2}"
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


def _zlab_drafter(raw: Mapping[str, Any], directory: Path) -> DrafterConfig:
    nested = raw.get("dflash_config") or {}
    _refuse_variants({**raw, **nested}, directory)
    architecture = _architecture(raw, directory)
    if architecture not in DRAFTER_ARCHITECTURES:
        raise CheckpointRefused(
            f"{directory}: architecture {architecture!r} is not a DFlash drafter; "
            f"supported: {', '.join(DRAFTER_ARCHITECTURES)}"
        )
    merged = {**raw, **nested}
    layer_ids = _layer_ids(merged, "target_layer_ids", directory)
    vocab_size = _int(raw, "vocab_size", directory)
    num_target_layers = merged.get("num_target_layers")
    return DrafterConfig(
        architecture=DRAFTER_ARCHITECTURES[0],
        format="z-lab",
        decoder=_decoder(raw, directory, qk_norm=True),
        vocab_size=vocab_size,
        draft_vocab_size=int(merged.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(merged.get("target_hidden_size") or raw["hidden_size"]),
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
        block_size=_block_size(merged, directory),
        mask_token_id=_int(merged, "mask_token_id", directory),
        capture_layer_ids=tuple(i + 1 for i in layer_ids),
    )


def _speculators_drafter(raw: Mapping[str, Any], directory: Path) -> DrafterConfig:
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise CheckpointRefused(f"{directory}: transformer_layer_config is missing")
    _refuse_variants({**layers, **raw}, directory)
    kind = raw.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise CheckpointRefused(f"{directory}: speculators_model_type {kind!r} is not 'dflash'")
    decoder = _decoder(layers, directory, qk_norm=True)
    vocab_size = _int(layers, "vocab_size", directory)
    return DrafterConfig(
        architecture=DRAFTER_ARCHITECTURES[0],
        format="speculators",
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(raw.get("target_hidden_size") or decoder.hidden_size),
        num_target_layers=None,
        block_size=_block_size(raw, directory),
        mask_token_id=_int(raw, "mask_token_id", directory),
        capture_layer_ids=_layer_ids(raw, "aux_hidden_state_layer_ids", directory),
    )


def _refuse_variants(config: Mapping[str, Any], directory: Path) -> None:
    """Refuse, by name, drafters whose computation differs from DFlash's."""
    names = [str(config.get(key, "")) for key in ("speculators_model_type", "projector_type")]
    names += [str(name) for name in config.get("architectures") or ()]
    for name in names:
        for prefix, label in _OTHER_DRAFTERS.items():
            if prefix in name.lower().replace("_", "").replace("-", ""):
                raise CheckpointRefused(f"{directory}: this is a {label} drafter, not DFlash")
    _refuse_sliding_window(config, directory)
    if config.get("use_swa"):
        raise CheckpointRefused(
            f"{directory}: sliding-window drafters are not supported (use_swa is true, "
            f"swa_window_size is {config.get('swa_window_size')})"
        )
    for key, label in (
        ("causal", "causal drafters are not supported"),
        ("is_causal", "causal drafters are not supported"),
        ("attention_sink_bias", "attention sinks are not supported"),
        ("add_swa_attention_sink_bias", "attention sinks are not supported"),
        ("sample_from_anchor", "drafters that sample from the bonus position are not supported"),
        ("shift_label", "drafters with shifted labels are not supported"),
    ):
        if config.get(key):
            raise CheckpointRefused(f"{directory}: {label} ({key} is true)")


def _refuse_sliding_window(config: Mapping[str, Any], directory: Path) -> None:
    kinds = set(config.get("layer_types") or ())
    if config.get("use_sliding_window"):
        kinds.add("sliding_attention")
    other = sorted(kinds - {"full_attention"})
    if other:
        raise CheckpointRefused(
            f"{directory}: layers of kind {', '.join(other)} are not supported, only "
            f"full_attention (sliding_window is {config.get('sliding_window')})"
        )


def _decoder(raw: Mapping[str, Any], directory: Path, *, qk_norm: bool) -> DecoderConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointRefused(
            f"{directory}: hidden_act {activation!r} is not supported, 'silu' is"
        )
    hidden_size = _int(raw, "hidden_size", directory)
    num_heads = _int(raw, "num_attention_heads", directory)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointRefused(
            f"{directory}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return DecoderConfig(
        num_layers=_int(raw, "num_hidden_layers", directory),
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size", directory),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, directory),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qk_norm,
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
    )


_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
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
_ROPE_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def _rope(raw: Mapping[str, Any], directory: Path) -> RopeConfig:
    """theta stands beside or inside `rope_parameters` / `rope_scaling`, whichever exists."""
    scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_PARAMETERS:
        raise CheckpointRefused(
            f"{directory}: rope type {kind!r} is not supported; "
            f"supported: {', '.join(_ROPE_PARAMETERS)}"
        )
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1:
        raise CheckpointRefused(f"{directory}: partial_rotary_factor other than 1 is not supported")
    missing = [name for name in _ROPE_PARAMETERS[kind] if scaling.get(name) is None]
    if missing:
        raise CheckpointRefused(f"{directory}: rope type {kind!r} lacks {', '.join(missing)}")
    names = _ROPE_PARAMETERS[kind] + _ROPE_OPTIONAL.get(kind, ())
    return RopeConfig(
        kind=kind,
        theta=theta,
        parameters={name: scaling[name] for name in names if scaling.get(name) is not None},
    )


def _eos_token_ids(raw: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """generation_config.json overrides config.json, as in transformers' `generate`."""
    found = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        found = _read_json(generation).get("eos_token_id", found)
    if found is None:
        return ()
    return tuple(int(i) for i in found) if isinstance(found, list) else (int(found),)


def _architecture(raw: Mapping[str, Any], directory: Path) -> str:
    architectures = list(raw.get("architectures") or [])
    if len(architectures) != 1:
        raise CheckpointRefused(
            f"{directory}: architectures is {architectures!r}, need exactly one"
        )
    return str(architectures[0])


def _layer_ids(raw: Mapping[str, Any], key: str, directory: Path) -> tuple[int, ...]:
    ids = raw.get(key)
    if not ids:
        raise CheckpointRefused(f"{directory}: {key} is missing, and it can't be guessed")
    if list(ids) != sorted(set(ids)):
        raise CheckpointRefused(f"{directory}: {key} {ids} is not strictly ascending")
    return tuple(int(i) for i in ids)


def _block_size(raw: Mapping[str, Any], directory: Path) -> int:
    block_size = _int(raw, "block_size", directory)
    if block_size < 2:
        raise CheckpointRefused(f"{directory}: block_size is {block_size}, at least 2 is needed")
    return block_size


def _int(raw: Mapping[str, Any], key: str, directory: Path) -> int:
    if raw.get(key) is None:
        raise CheckpointRefused(f"{directory}: {key} is missing, and it can't be guessed")
    return int(raw[key])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointRefused(f"{path.parent}: {path.name} is missing") from None
    except json.JSONDecodeError as error:
        raise CheckpointRefused(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"{path}: not a JSON object")
    return raw
