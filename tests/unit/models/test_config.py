"""Checkpoint configs: what loads, and what is refused by the name and values of its field."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import models
from models.config import (
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    check_pairing,
    load_drafter_config,
    load_target_config,
    reduced,
)
from models.config_fields import CheckpointRefused
from tests.unit.actors.builders import engine_config

DECODER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "vocab_size": 100,
}
TARGET = {**DECODER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6}
DFLASH = {"target_layer_ids": [0, 2, 4], "mask_token_id": 0}
ZLAB = {
    **DECODER,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "num_target_layers": 6,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "dflash_config": DFLASH,
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "proposal_methods": []},
    "transformer_layer_config": dict(DECODER),
    "aux_hidden_state_layer_ids": [1, 3, 5],
    "block_size": 5,
    "mask_token_id": 0,
    "draft_vocab_size": 40,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MISSING = object()


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `a.b` keys set, or removed where the value is MISSING."""
    result: dict[str, Any] = json.loads(json.dumps(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = result
        for parent in parents:
            place = place[parent]
        if value is MISSING:
            del place[key]
        else:
            place[key] = value
    return result


Load = Callable[..., Any]


@pytest.fixture
def target(tmp_path: Path) -> Load:
    """`target(**changes)` loads the base target with these changes."""

    def load(base: Mapping[str, Any] = TARGET, /, **changes: Any) -> TargetConfig:
        (tmp_path / "config.json").write_text(json.dumps(changed(base, changes)))
        return load_target_config(tmp_path)

    return load


@pytest.fixture
def drafter(tmp_path: Path) -> Load:
    """`drafter(base, **changes)` loads a drafter with these changes."""

    def load(base: Mapping[str, Any] = ZLAB, /, **changes: Any) -> DrafterConfig:
        (tmp_path / "config.json").write_text(json.dumps(changed(base, changes)))
        return load_drafter_config(tmp_path)

    return load


def refuses(*words: object) -> Any:
    """Expect a refusal whose message holds every one of `words`."""
    pattern = "".join(rf"(?=[\s\S]*(?<![\w.]){re.escape(str(word))}(?!\w))" for word in words)
    return pytest.raises(CheckpointRefused, match=pattern)


# -------------------------------------------------------------------------------------- targets


def test_target_fields(target: Load) -> None:
    config = target(tie_word_embeddings=True, dtype="bfloat16", attention_bias=True, mlp_bias=True)
    assert config.architecture == "LlamaForCausalLM"
    assert config.vocab_size == 100
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    decoder = config.decoder
    assert (decoder.num_layers, decoder.hidden_size, decoder.intermediate_size) == (6, 64, 96)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (4, 2, 32)
    assert (decoder.rms_norm_eps, decoder.max_position_embeddings) == (1e-5, 512)
    assert (decoder.attention_bias, decoder.mlp_bias, decoder.qk_norm) == (True, True, False)
    assert decoder.rope == RopeConfig(kind="default", theta=5000.0, parameters={})


def test_a_qwen3_target_has_norms_on_its_heads(target: Load) -> None:
    config = target(architectures=["Qwen3ForCausalLM"])
    assert config.decoder.qk_norm
    assert not config.tie_word_embeddings
    assert not config.decoder.attention_bias


def test_old_llama_configs_name_neither_kv_heads_nor_head_size(target: Load) -> None:
    decoder = target(num_key_value_heads=MISSING, head_dim=MISSING, torch_dtype="float16").decoder
    assert (decoder.num_kv_heads, decoder.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (0, {"eos_token_id": 0}, (0,)),
        (7, {"temperature": 0.6}, (7,)),
    ],
)
def test_end_tokens(
    target: Load, tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert target(eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures", "MistralForCausalLM"]),
        ({"architectures": MISSING}, ["architectures"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (
            {"use_sliding_window": True, "sliding_window": 77},
            ["sliding_attention", "sliding_window", 77],
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 77},
            ["sliding_attention", 77],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"hidden_size": MISSING}, ["hidden_size"]),
        ({"vocab_size": MISSING}, ["vocab_size"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", 4, "num_key_value_heads", 3]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope type", "dynamic"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope type", "longrope"]),
    ],
)
def test_targets_refused(target: Load, changes: dict[str, Any], words: list[object]) -> None:
    with refuses(*words):
        target(**changes)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for load in (load_target_config, load_drafter_config):
        with pytest.raises(CheckpointRefused, match=r"config\.json"):
            load(tmp_path)


# ----------------------------------------------------------------------------------------- rope


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 777.0},
        {"rope_theta": 777.0, "rope_scaling": None},
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 777.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}},
        {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 777.0}},
        {"rope_theta": MISSING, "rope_scaling": {"rope_theta": 777.0, "type": "default"}},
    ],
)
def test_theta_is_found_in_either_place(
    target: Load, drafter: Load, changes: dict[str, Any]
) -> None:
    expected = RopeConfig(kind="default", theta=777.0, parameters={})
    assert target(**changes).decoder.rope == expected
    assert drafter(**changes).decoder.rope == expected
    nested = {f"transformer_layer_config.{key}": value for key, value in changes.items()}
    assert drafter(SPECULATORS, **nested).decoder.rope == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("parameters", [LLAMA3, YARN, {"rope_type": "linear", "factor": 3.0}])
def test_rope_kinds(drafter: Load, key: str, parameters: dict[str, Any]) -> None:
    numbers = {name: value for name, value in parameters.items() if name != "rope_type"}
    expected = RopeConfig(kind=parameters["rope_type"], theta=5000.0, parameters=numbers)
    assert drafter(**{key: parameters}).decoder.rope == expected
    old_name = {"type": parameters["rope_type"], **numbers}
    assert drafter(**{key: old_name}).decoder.rope == expected


@pytest.mark.parametrize(
    ("parameters", "lacking"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        *(
            ({name: value for name, value in LLAMA3.items() if name != lacking}, lacking)
            for lacking in LLAMA3
            if lacking != "rope_type"
        ),
    ],
)
def test_rope_numbers_are_never_guessed(
    drafter: Load, parameters: dict[str, Any], lacking: str
) -> None:
    with refuses(lacking):
        drafter(rope_scaling=parameters)


# ------------------------------------------------------------------------------------- drafters


def test_zlab_fields(drafter: Load) -> None:
    config = drafter()
    assert (config.architecture, config.format) == ("DFlashDraftModel", "z-lab")
    assert config.capture_layer_ids == (1, 3, 5), "the target captures before a layer"
    assert (config.block_size, config.num_drafts, config.mask_token_id) == (5, 4, 0)
    assert (config.vocab_size, config.draft_vocab_size) == (100, 100)
    assert (config.target_hidden_size, config.num_target_layers) == (64, 6)
    assert config.decoder.qk_norm
    assert config.decoder.num_layers == 2


def test_zlab_ids_at_top_level(drafter: Load) -> None:
    config = drafter(dflash_config=MISSING, target_layer_ids=[1, 3], mask_token_id=9)
    assert (config.capture_layer_ids, config.mask_token_id) == ((2, 4), 9)


def test_speculators_fields(drafter: Load) -> None:
    config = drafter(SPECULATORS)
    assert (config.architecture, config.format) == ("DFlashDraftModel", "speculators")
    assert config.capture_layer_ids == (1, 3, 5), "these ids are shifted already"
    assert (config.block_size, config.num_drafts, config.mask_token_id) == (5, 4, 0)
    assert (config.vocab_size, config.draft_vocab_size) == (100, 40)
    assert (config.target_hidden_size, config.num_target_layers) == (64, None)
    assert config.decoder.head_dim == 32
    assert drafter(SPECULATORS, draft_vocab_size=MISSING).draft_vocab_size == 100
    assert drafter(SPECULATORS, target_hidden_size=128).target_hidden_size == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"dflash_config.causal": False},
        {"dflash_config.use_swa": False, "dflash_config.swa_window_size": None},
        {"sliding_window": 4096},
        {"layer_types": MISSING},
        {"num_target_layers": MISSING},
        {"dflash_config.block_size": 5, "block_size": MISSING},
    ],
)
def test_harmless_variants_load(drafter: Load, changes: dict[str, Any]) -> None:
    config = drafter(**changes)
    assert config.decoder.attention_bias == bool(changes.get("attention_bias"))
    assert config.block_size == 5


REFUSED: list[tuple[dict[str, Any], list[object]]] = [
    (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 77},
        ["sliding_attention", "sliding_window", 77],
    ),
    ({"use_sliding_window": True, "sliding_window": 77}, ["sliding_attention", 77]),
    ({"dflash_config.causal": True}, ["causal", "true"]),
    ({"causal": True}, ["causal", "true"]),
    ({"is_causal": True}, ["causal", "is_causal"]),
    (
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 77},
        ["use_swa", "swa_window_size", 77],
    ),
    ({"use_swa": True, "swa_window_size": 77}, ["use_swa", "swa_window_size", 77]),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope type", "dynamic"]),
    ({"architectures": ["DFlash2DraftModel"]}, ["DFlash 2"]),
    ({"dflash_config.projector_type": "dflash_2"}, ["DFlash 2"]),
    ({"architectures": ["Eagle3Speculator"]}, ["EAGLE-3"]),
    ({"architectures": ["DominoDraftModel"]}, ["Domino"]),
    ({"architectures": ["Qwen3ForCausalLM"]}, ["architectures", "Qwen3ForCausalLM"]),
    ({"architectures": []}, ["architectures"]),
    ({"attention_sink_bias": True}, ["attention_sink_bias"]),
    ({"dflash_config.sample_from_anchor": True}, ["sample_from_anchor"]),
    ({"dflash_config.shift_label": True}, ["shift_label"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"dflash_config.target_layer_ids": MISSING}, ["target_layer_ids", "missing"]),
    ({"dflash_config.target_layer_ids": []}, ["target_layer_ids"]),
    ({"dflash_config.target_layer_ids": [2, 0]}, ["target_layer_ids", "[2, 0]"]),
    ({"dflash_config.target_layer_ids": [2, 2]}, ["target_layer_ids", "[2, 2]"]),
    ({"dflash_config.mask_token_id": MISSING}, ["mask_token_id", "missing"]),
    ({"dflash_config.mask_token_id": None}, ["mask_token_id", "missing"]),
    ({"block_size": MISSING}, ["block_size", "missing"]),
    ({"block_size": 1}, ["block_size", 1, 2]),
    ({"block_size": "5"}, ["block_size", "'5'"]),
    ({"num_target_layers": 0}, ["num_target_layers", 0]),
    ({"dflash_config.mask_token_id": -1}, ["mask_token_id", -1]),
    ({"dflash_config.target_layer_ids": [0, "2"]}, ["target_layer_ids", "[0, '2']"]),
    ({"dflash_config": [1, 2]}, ["dflash_config", "[1, 2]"]),
    ({"vocab_size": MISSING}, ["vocab_size", "missing"]),
    ({"hidden_size": MISSING}, ["hidden_size", "missing"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_zlab_drafters_refused(drafter: Load, changes: dict[str, Any], words: list[object]) -> None:
    with refuses(*words):
        drafter(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transformer_layer_config": MISSING}, ["transformer_layer_config", "missing"]),
        ({"aux_hidden_state_layer_ids": MISSING}, ["aux_hidden_state_layer_ids", "missing"]),
        ({"aux_hidden_state_layer_ids": [3, 1]}, ["aux_hidden_state_layer_ids", "[3, 1]"]),
        ({"mask_token_id": MISSING}, ["mask_token_id", "missing"]),
        ({"block_size": MISSING}, ["block_size", "missing"]),
        ({"speculators_model_type": "eagle3"}, ["EAGLE-3"]),
        ({"speculators_model_type": "mtp"}, ["speculators_model_type", "mtp"]),
        (
            {
                "transformer_layer_config.layer_types": ["sliding_attention"] * 2,
                "transformer_layer_config.sliding_window": 77,
            },
            ["sliding_attention", 77],
        ),
        ({"transformer_layer_config.vocab_size": MISSING}, ["vocab_size", "missing"]),
    ],
)
def test_speculators_drafters_refused(
    drafter: Load, changes: dict[str, Any], words: list[object]
) -> None:
    with refuses(*words):
        drafter(SPECULATORS, **changes)


def test_the_drafter_that_comes_with_the_package() -> None:
    directory = Path(models.__path__[0]) / "checkpoints" / "smollm2-135m-instruct-dflash"
    config = load_drafter_config(directory)
    assert config.capture_layer_ids == (2, 9, 15, 21, 28)
    assert (config.num_drafts, config.mask_token_id, config.num_target_layers) == (9, 16, 30)
    assert config.decoder.rope == RopeConfig(kind="default", theta=100000.0, parameters={})


# -------------------------------------------------------------------------------------- pairing


@pytest.mark.parametrize("base", [ZLAB, SPECULATORS])
def test_a_pair_that_fits(tmp_path: Path, target: Load, drafter: Load, base: Any) -> None:
    check_pairing(target(), drafter(base), num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("target_changes", "drafter_changes", "words"),
    [
        ({"hidden_size": 128}, {}, ["hidden size", 64, 128]),
        ({}, {"hidden_size": 128}, ["hidden size", 128, 64]),
        ({}, {"hidden_size": 128, "target_hidden_size": 64}, ["hidden size", 128, 64]),
        ({"vocab_size": 101}, {}, ["vocabulary", 100, 101]),
        ({}, {"vocab_size": 99}, ["vocabulary", 99, 100]),
        ({"num_hidden_layers": 7}, {}, ["target layers", 6, 7]),
        ({}, {"num_target_layers": 30}, ["target layers", 30, 6]),
        ({}, {"dflash_config.target_layer_ids": [0, 5]}, ["target_layer_ids", 5, 4]),
        ({}, {"dflash_config.target_layer_ids": [-1, 4]}, ["target_layer_ids", -1, 0]),
        ({}, {"dflash_config.mask_token_id": 100}, ["mask_token_id", 100]),
    ],
)
def test_pairs_refused(
    target: Load,
    drafter: Load,
    target_changes: dict[str, Any],
    drafter_changes: dict[str, Any],
    words: list[object],
) -> None:
    pair = target(**target_changes), drafter(**drafter_changes)
    with refuses(*words):
        check_pairing(*pair, num_speculative_tokens=4)


@pytest.mark.parametrize("num_speculative_tokens", [3, 5])
def test_the_number_of_drafts_is_the_block_less_the_bonus(
    target: Load, drafter: Load, num_speculative_tokens: int
) -> None:
    pair = target(), drafter()
    with refuses("num_speculative_tokens", num_speculative_tokens, "block_size", 5, 4):
        check_pairing(*pair, num_speculative_tokens)


@pytest.mark.parametrize("layer_id", [0, 6])
def test_ids_of_a_speculators_drafter_are_refused_by_their_own_field(
    target: Load, drafter: Load, layer_id: int
) -> None:
    """These ids are the inputs of layers already: 1 to T - 1."""
    ids = sorted({layer_id, 3})
    pair = target(), drafter(SPECULATORS, aux_hidden_state_layer_ids=ids)
    with refuses("aux_hidden_state_layer_ids", layer_id, 5):
        check_pairing(*pair, num_speculative_tokens=4)


# ------------------------------------------------------------------------ reduced, for profiling


def pair_of(num_layers: int, capture: tuple[int, ...]) -> tuple[TargetConfig, DrafterConfig]:
    target = engine_config(num_drafts=3).target
    drafter = engine_config(num_drafts=3).drafter
    assert drafter is not None
    return (
        replace(target, decoder=replace(target.decoder, num_layers=num_layers)),
        replace(drafter, capture_layer_ids=capture),
    )


def test_a_reduced_target_keeps_capture_points_it_still_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, drafter = reduced(*pair_of(30, (2, 9, 15)), 16)
    assert target.decoder.num_layers == 16
    assert drafter is not None
    assert drafter.capture_layer_ids == (2, 9, 15)
    assert "16 of the target's 30 layers" in caplog.text
    assert "not meaningful" in caplog.text


@pytest.mark.parametrize("num_layers", range(5, 29))
def test_a_reduced_target_captures_at_even_distances_otherwise(num_layers: int) -> None:
    _, drafter = reduced(*pair_of(30, (2, 9, 15, 21, 28)), num_layers)
    assert drafter is not None
    points = drafter.capture_layer_ids
    assert len(points) == 5
    assert points[0] >= 0
    assert points[-1] == num_layers - 1
    distances = [b - a for a, b in pairwise(points)]
    assert min(distances) >= 1
    assert max(distances) - min(distances) <= 1


def test_a_reduced_target_without_a_drafter() -> None:
    target, _ = pair_of(30, (2,))
    assert reduced(target, None, 1)[0].decoder.num_layers == 1


def test_a_reduced_target_may_be_too_shallow_or_too_deep() -> None:
    with pytest.raises(CheckpointRefused, match=r"is 4, the drafter captures 5 layers"):
        reduced(*pair_of(30, (2, 9, 15, 21, 28)), 4)
    with pytest.raises(CheckpointRefused, match=r"is 31, the target has 30 layers"):
        reduced(*pair_of(30, (2,)), 31)
