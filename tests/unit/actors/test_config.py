import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.bundles import bundles
from actors.config import EngineConfig
from actors.errors import ConfigError

MAX_POSITIONS = 256
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": 1,
    "dtype": "float32",
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "num_target_layers": 4,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 3},
}
# 4 target layers and 1 draft layer, K and V, 2 heads of 4 values, float32.
BYTES_PER_TOKEN = (4 + 1) * 2 * 2 * 4 * 4

Save = Callable[..., str]


@pytest.fixture
def target(tmp_path: Path) -> Save:
    """Save the tiny target with some fields changed; its directory."""
    return lambda **changes: _save(tmp_path / "target", {**TARGET, **changes})


@pytest.fixture
def drafter(tmp_path: Path) -> Save:
    """Save the tiny drafter with some fields changed; its directory."""
    return lambda **changes: _save(tmp_path / "drafter", {**DRAFTER, **changes})


def _save(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def resolve(model: str, drafter: str | None = None, **args: Any) -> EngineConfig:
    if drafter is not None:
        args["speculative_config"] = {"method": "dflash", "model": drafter}
    return EngineConfig.resolve({"model": model, **args})


def refusal(args: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.resolve(args)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_defaults(target: Save) -> None:
    model = target()
    config = resolve(model)
    assert config.target_path == Path(model)
    assert config.served_model_name == model
    assert config.tensor_parallel_size == 1
    assert config.dtype == "float32"
    assert config.max_model_len == MAX_POSITIONS
    assert config.block_size == 16
    assert config.pages_per_request == MAX_POSITIONS // 16
    assert config.num_slots == config.max_num_seqs
    assert (config.drafter, config.drafter_path, config.num_drafts) == (None, None, 0)


def test_the_block_size_of_the_drafter_sets_the_drafts(target: Save, drafter: Save) -> None:
    config = resolve(target(), drafter())
    assert config.num_drafts == 3
    assert config.drafter is not None
    assert config.drafter.capture_layer_ids == (1, 3)


def test_the_number_of_drafts_may_be_spelled_out(target: Save, drafter: Save) -> None:
    wanted = {"method": "dflash", "model": drafter(), "num_speculative_tokens": 3}
    assert resolve(target(), speculative_config=wanted).num_drafts == 3


def test_steps_are_planned_ahead_unless_told_otherwise(target: Save) -> None:
    assert resolve(target()).async_scheduling


def test_what_the_user_sets_is_kept(target: Save) -> None:
    wanted: dict[str, Any] = {
        "served_model_name": "tiny",
        "tensor_parallel_size": 2,
        "dtype": "bfloat16",
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "block_size": 8,
        "num_kv_pages": 20,
        "cpus_per_shard": 1.5,
        "threads_per_shard": 2,
        "pin_threads": True,
        "neuron_cores_per_shard": 2,
        "wait_for_nodes": True,
        "step_timeout_s": 9.0,
        "backend": "eager",
        "exact": False,
        "late_compile": "error",
        "async_scheduling": False,
    }
    config = resolve(target(), **wanted)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.pages_per_request == 13


# ---------------------------------------------------------------------------- backend and buckets


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that passes for a C++ compiler, named in CXX."""
    path = tmp_path / "compiler"
    path.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_backend_is_chosen_and_is_exact(
    target: Save, compiler: Path, backend: str, dtype: str
) -> None:
    config = resolve(target(), backend=backend, dtype=dtype)
    assert (config.backend, config.exact, config.late_compile) == ("cpu", True, "log")
    assert not resolve(target(), backend=backend, dtype=dtype, exact=False).exact


def test_the_default_backend_is_auto(target: Save, compiler: Path) -> None:
    assert resolve(target()).backend == "cpu"


@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("named", ["/nowhere/compiler", "no-such-compiler", ""])
def test_without_a_compiler_only_eager_is_served(
    target: Save, monkeypatch: pytest.MonkeyPatch, backend: str, named: str
) -> None:
    monkeypatch.setenv("CXX", named)
    message = refusal({"model": target(), "backend": backend})
    assert all(word in message for word in (f"backend {backend}", f"({named})", "CXX", "eager"))
    assert resolve(target(), backend="eager").backend == "eager"


def test_without_cxx_the_usual_compiler_is_looked_for(
    target: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "(c++)" in refusal({"model": target()})
    (tmp_path / "c++").touch(mode=0o755)
    assert resolve(target()).backend == "cpu"


def test_the_compiler_may_have_a_launcher(
    target: Save, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{compiler} g++")
    assert resolve(target()).backend == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eager_is_not_exact_unless_asked(target: Save, dtype: str) -> None:
    assert not resolve(target(), backend="eager", dtype=dtype).exact


def test_eager_can_promise_exact_in_float32_only(target: Save) -> None:
    assert resolve(target(), backend="eager", exact=True).exact
    message = refusal({"model": target(), "backend": "eager", "exact": True, "dtype": "bfloat16"})
    assert all(word in message for word in ("exact", "eager", "bfloat16", "cpu", "float32"))


def test_default_buckets_reach_what_the_configuration_allows(target: Save, drafter: Save) -> None:
    args: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 200, "block_size": 8}
    buckets = resolve(target(), drafter(), **args).buckets
    assert buckets.decode_sequences == (1, 2, 4, 6)
    assert buckets.verify_widths == (1, 2, 4)
    assert buckets.prefill_widths == (16, 64, 256)
    assert buckets.context_lengths == (32, 64, 128, 200)
    plain = resolve(target(), max_num_seqs=1, max_model_len=20).buckets
    assert (plain.decode_sequences, plain.verify_widths) == ((1,), (1,))
    assert plain.context_lengths == (20,)


def test_the_users_buckets_are_kept(target: Save, drafter: Save) -> None:
    wanted = {
        "decode_sequences": [3, 8],
        "verify_widths": [2, 4],
        "prefill_widths": [24],
        "context_lengths": [1, MAX_POSITIONS],
    }
    found = resolve(target(), drafter(), buckets=wanted).buckets
    assert found.model_dump() == {name: tuple(sizes) for name, sizes in wanted.items()}
    some = resolve(target(), drafter(), buckets={"prefill_widths": [7, 99]}).buckets
    assert some.prefill_widths == (7, 99)
    assert some.decode_sequences == (1, 2, 4, 8)


LIMITS = {"decode_sequences": 8, "verify_widths": 4, "context_lengths": MAX_POSITIONS}


@pytest.mark.parametrize("field", [*LIMITS, "prefill_widths"])
@pytest.mark.parametrize("before", [[2, 2], [3, 1], [0], [-1, 1], [1, 3, 2]])
def test_bucket_sizes_must_ascend(
    target: Save, drafter: Save, field: str, before: list[int]
) -> None:
    sizes = [*before, LIMITS.get(field, 64)]
    assert EngineConfig.resolve(
        {
            "model": target(),
            "speculative_config": {"method": "dflash", "model": drafter()},
            "buckets": {field: sizes[-1:]},
        }
    )
    message = refusal(
        {
            "model": target(),
            "speculative_config": {"method": "dflash", "model": drafter()},
            "buckets": {field: sizes},
        }
    )
    assert all(word in message for word in (f"buckets.{field}", str(sizes), "ascending"))


@pytest.mark.parametrize("field", LIMITS)
@pytest.mark.parametrize("off_by", [-1, 1])
def test_bucket_sizes_must_end_with_the_limit(
    target: Save, drafter: Save, field: str, off_by: int
) -> None:
    limit = LIMITS[field]
    message = refusal(
        {
            "model": target(),
            "speculative_config": {"method": "dflash", "model": drafter()},
            "buckets": {field: [1, limit + off_by]},
        }
    )
    named = (f"buckets.{field}", f"with {limit + off_by}", f"with {limit}")
    assert all(word in message for word in named), message


def test_without_speculation_a_row_verifies_one_token(target: Save) -> None:
    assert "with 4" in refusal({"model": target(), "buckets": {"verify_widths": [4]}})


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_dtype_auto_is_the_one_of_the_weights(target: Save, stored: str) -> None:
    assert resolve(target(dtype=stored)).dtype == stored


def test_dtype_can_be_forced(target: Save) -> None:
    assert resolve(target(dtype="bfloat16"), dtype="float32").dtype == "float32"


def test_the_pool_holds_what_all_requests_may_need_at_most(target: Save) -> None:
    config = resolve(target(), max_num_seqs=2, max_model_len=100)
    assert config.num_kv_pages == 2 * 7 + 1


def test_kv_memory_is_split_over_target_and_drafter(target: Save, drafter: Save) -> None:
    memory = 17 * 16 * BYTES_PER_TOKEN
    config = resolve(target(), drafter(), kv_cache_memory_bytes=memory)
    assert config.num_kv_pages == 17
    config = resolve(target(), drafter(), kv_cache_memory_bytes=memory + 16 * BYTES_PER_TOKEN - 1)
    assert config.num_kv_pages == 17


@pytest.mark.parametrize(("tp", "heads_per_rank"), [(1, 2), (2, 1), (3, 1), (4, 1)])
def test_kv_memory_counts_the_heads_of_one_rank(target: Save, tp: int, heads_per_rank: int) -> None:
    memory = 20 * 16 * (4 * 2 * heads_per_rank * 4 * 4)
    config = resolve(target(), tensor_parallel_size=tp, kv_cache_memory_bytes=memory)
    assert config.num_kv_pages == 20


def test_kv_memory_in_bfloat16_holds_twice_the_pages(target: Save) -> None:
    args: dict[str, Any] = {"kv_cache_memory_bytes": 20 * 16 * (4 * 2 * 2 * 4 * 4)}
    assert resolve(target(), dtype="float32", **args).num_kv_pages == 20
    assert resolve(target(), dtype="bfloat16", **args).num_kv_pages == 40


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"max_num_seq": 4}, ["max_num_seq", "unknown", "4"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0", "1"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "integer", "'many'"]),
        ({"max_num_seqs": 2.5}, ["max_num_seqs", "integer", "2.5"]),
        ({"max_num_seqs": None}, ["max_num_seqs", "integer", "None"]),
        ({"max_num_batched_tokens": 15}, ["max_num_batched_tokens", "15", "16"]),
        ({"max_model_len": 1}, ["max_model_len", "1", "2"]),
        ({"max_model_len": 257}, ["max_model_len", "257", "max_position_embeddings", "256"]),
        ({"block_size": 0}, ["block_size", "0", "1"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size", "0", "1"]),
        ({"dtype": "float16"}, ["dtype", "float16", "float32", "bfloat16"]),
        ({"num_kv_pages": 1}, ["num_kv_pages", "1", "2"]),
        ({"num_kv_pages": 16}, ["num_kv_pages", "16", "17", "max_model_len", "256"]),
        ({"kv_cache_memory_bytes": 1}, ["kv_cache_memory_bytes", "0 pages", "17"]),
        ({"kv_cache_memory_bytes": 0}, ["kv_cache_memory_bytes", "0", "1"]),
        (
            {"num_kv_pages": 99, "kv_cache_memory_bytes": 10**9},
            ["num_kv_pages", "kv_cache_memory_bytes", "both"],
        ),
        (
            {"max_num_seqs": 20, "max_num_batched_tokens": 19},
            ["max_num_batched_tokens", "19", "max_num_seqs", "20"],
        ),
        ({"step_timeout_s": 0}, ["step_timeout_s", "0"]),
        ({"async_scheduling": "no"}, ["async_scheduling", "no"]),
        ({"backend": "cuda"}, ["backend", "cuda", "auto", "cpu", "eager"]),
        ({"backend": None}, ["backend", "None"]),
        ({"exact": "yes"}, ["exact", "yes"]),
        ({"late_compile": "ignore"}, ["late_compile", "ignore", "log", "error"]),
        ({"buckets": 3}, ["buckets", "3"]),
        ({"buckets": {"decode_sequences": []}}, ["buckets.decode_sequences", "[]"]),
        ({"buckets": {"decode_sequences": 8}}, ["buckets.decode_sequences", "8", "list"]),
        ({"buckets": {"prefill_widths": [16, "x"]}}, ["buckets.prefill_widths.1", "'x'"]),
        ({"buckets": {"prefil_widths": [16]}}, ["buckets.prefil_widths", "unknown"]),
        ({"step_timeout_s": float("nan")}, ["step_timeout_s", "nan"]),
        ({"cpus_per_shard": -1}, ["cpus_per_shard", "-1", "0.0001"]),
        ({"cpus_per_shard": 0}, ["cpus_per_shard", "0.0001"]),
        ({"threads_per_shard": 0}, ["threads_per_shard", "0", "1"]),
        ({"served_model_name": ""}, ["served_model_name", "1"]),
        ({"speculative_config": "x"}, ["speculative_config", "'x'"]),
        ({"speculative_config": {"model": "x"}}, ["speculative_config.method", "required"]),
        (
            {"speculative_config": {"method": "eagle3", "model": "x"}},
            ["speculative_config.method", "dflash", "eagle3"],
        ),
        (
            {"speculative_config": {"method": "dflash", "model": "x", "draft_len": 3}},
            ["speculative_config.draft_len", "unknown", "3"],
        ),
        (
            {
                "speculative_config": {
                    "method": "dflash",
                    "model": "x",
                    "num_speculative_tokens": 0,
                }
            },
            ["speculative_config.num_speculative_tokens", "0", "1"],
        ),
        ({"model": ""}, ["model"]),
        ({"model": "no-such-model"}, ["no-such-model"]),
        ({"model": 7}, ["model", "string", "7"]),
    ],
)
def test_refusals(target: Save, args: dict[str, Any], named: list[str]) -> None:
    message = refusal({"model": target(), **args})
    missing = [name for name in named if name not in message]
    assert not missing, message


def test_the_model_is_required() -> None:
    assert "model: required" in refusal({})


def test_every_fault_of_the_fields_is_in_the_one_line(target: Save) -> None:
    message = refusal({"model": target(), "max_num_seqs": 0, "block_size": "big", "colour": 1})
    assert all(name in message for name in ("max_num_seqs", "block_size", "colour"))


def test_the_budget_must_hold_every_verify_row(target: Save, drafter: Save) -> None:
    wanted = {"method": "dflash", "model": drafter()}
    args = {"model": target(), "speculative_config": wanted, "max_num_seqs": 8}
    message = refusal({**args, "max_num_batched_tokens": 31})
    assert all(word in message for word in ("max_num_batched_tokens", "31", "8", "32"))
    assert EngineConfig.resolve({**args, "max_num_batched_tokens": 32}).max_num_seqs == 8


def test_the_smallest_pool_and_the_longest_model_len_are_served(target: Save) -> None:
    config = resolve(target(), num_kv_pages=17, max_model_len=MAX_POSITIONS)
    assert (config.num_kv_pages, config.max_model_len) == (17, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 16}, ["hidden size", "16", "8"]),
        ({"target_hidden_size": 16}, ["hidden size", "16", "8"]),
        ({"vocab_size": 65}, ["vocabulary", "65", "64"]),
        ({"num_target_layers": 5}, ["target layers", "5", "4"]),
        (
            {"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 3}},
            ["target_layer_ids", "3", "0 to 2"],
        ),
        (
            {"dflash_config": {"target_layer_ids": [-1, 2], "mask_token_id": 3}},
            ["target_layer_ids", "-1", "0 to 2"],
        ),
        ({"dflash_config": {"mask_token_id": 3}}, ["target_layer_ids", "missing"]),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, ["mask_token_id", "missing"]),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 64}},
            ["mask_token_id", "64"],
        ),
        ({"block_size": None}, ["block_size", "missing"]),
        ({"block_size": 1}, ["block_size is 1", "at least 2"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "DFlashDraftModel"]),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    target: Save, drafter: Save, changes: dict[str, Any], named: list[str]
) -> None:
    wanted = {"method": "dflash", "model": drafter(**changes)}
    message = refusal({"model": target(), "speculative_config": wanted})
    missing = [name for name in named if name not in message]
    assert not missing, message


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_only_the_trained_number_of_drafts_is_served(
    target: Save, drafter: Save, num_drafts: int
) -> None:
    wanted = {"method": "dflash", "model": drafter(), "num_speculative_tokens": num_drafts}
    message = refusal({"model": target(), "speculative_config": wanted})
    assert all(
        word in message for word in ("num_speculative_tokens", str(num_drafts), "block_size", "3")
    )


def test_a_target_that_is_a_drafter_is_refused(drafter: Save) -> None:
    assert "DFlashDraftModel" in refusal({"model": drafter()})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": [4]}, "num_hidden_layers"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": {}}, "vocab_size"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"rms_norm_eps": [1e-6]}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": 5}, "architectures"),
    ],
)
def test_a_broken_target_config_is_one_line_naming_the_field(
    target: Save, changes: dict[str, Any], named: str
) -> None:
    assert named in refusal({"model": target(**changes)})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_config": [1]}, "dflash_config"),
        ({"dflash_config": {"target_layer_ids": 3, "mask_token_id": 3}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, "2"], "mask_token_id": 3}}, "target_layer_ids"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_broken_drafter_config_is_one_line_naming_the_field(
    target: Save, drafter: Save, changes: dict[str, Any], named: str
) -> None:
    wanted = {"method": "dflash", "model": drafter(**changes)}
    assert named in refusal({"model": target(), "speculative_config": wanted})


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refusal({"model": str(tmp_path)})


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal({"model": str(tmp_path)})


def test_the_config_is_constant_and_crosses_processes(target: Save, drafter: Save) -> None:
    config = resolve(target(), drafter())
    with pytest.raises(ValidationError, match="frozen"):
        config.max_num_seqs = 1
    assert pickle.loads(pickle.dumps(config)) == config


def test_placement_is_on_one_node_without_cores_by_default(target: Save) -> None:
    config = resolve(target())
    assert config.placement_strategy == "STRICT_PACK"
    assert bundles(config) == [{"CPU": 0.1}, {"CPU": 0.5}]


def test_a_bundle_per_rank_behind_the_routers(target: Save) -> None:
    config = resolve(
        target(), tensor_parallel_size=2, neuron_cores_per_shard=2, placement_strategy="SPREAD"
    )
    assert bundles(config) == [{"CPU": 0.1}, *[{"CPU": 0.5, "neuron_cores": 2}] * 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"neuron_cores_per_shard": 0.5}, "neuron_cores_per_shard.*integer.*0.5"),
        ({"neuron_cores_per_shard": 0}, "neuron_cores_per_shard.*greater than or equal to 1"),
        ({"placement_strategy": "STRICT_SPREAD"}, "placement_strategy.*'SPREAD'.*STRICT_SPREAD"),
        (
            {"placement_strategy": "PACK", "pin_threads": True},
            "placement_strategy is PACK, pin_threads needs STRICT_PACK",
        ),
    ],
)
def test_a_placement_that_cannot_work_is_refused(
    target: Save, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(target(), **args)


# ------------------------------------------------------------------------- dedicated drafters


def speculating(target: str, drafter: str, tp: int = 2, **changes: Any) -> EngineConfig:
    """With these fields of `speculative_config`."""
    speculative = {"method": "dflash", "model": drafter, **changes}
    return EngineConfig.resolve(
        {
            "model": target,
            "tensor_parallel_size": tp,
            "speculative_config": speculative,
            "max_model_len": 64,
        }
    )


@pytest.mark.parametrize(
    ("changes", "dedicated", "size", "ranks"),
    [
        ({}, False, 2, 2),
        ({"placement": "colocated"}, False, 2, 2),
        ({"tensor_parallel_size": 2}, False, 2, 2),
        ({"placement": "dedicated"}, True, 1, 3),
        ({"placement": "dedicated", "tensor_parallel_size": 1}, True, 1, 3),
        ({"placement": "dedicated", "tensor_parallel_size": 3}, True, 3, 5),
    ],
)
def test_where_drafters_live(
    target: Save, drafter: Save, changes: dict[str, Any], dedicated: bool, size: int, ranks: int
) -> None:
    config = speculating(target(), drafter(), **changes)
    assert config.is_dedicated == dedicated
    assert config.drafter_parallel_size == size
    assert config.num_ranks == ranks


def test_without_speculation_nobody_drafts(target: Save) -> None:
    config = EngineConfig.resolve({"model": target(), "tensor_parallel_size": 2})
    assert (config.is_dedicated, config.drafter_parallel_size, config.num_ranks) == (False, 0, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": "elsewhere"}, ["speculative_config.placement", "elsewhere", "dedicated"]),
        ({"tensor_parallel_size": 1}, ["speculative_config.tensor_parallel_size", "1", "2"]),
        (
            {"placement": "colocated", "tensor_parallel_size": 3},
            ["speculative_config.tensor_parallel_size", "3", "2", "dedicated"],
        ),
        (
            {"placement": "dedicated", "tensor_parallel_size": 0},
            ["speculative_config.tensor_parallel_size", "0", "1"],
        ),
    ],
)
def test_drafters_that_cannot_be_placed_are_refused(
    target: Save, drafter: Save, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        speculating(target(), drafter(), **changes)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("value", [0, -1.0, float("inf")])
def test_exchanges_take_some_time(target: Save, value: float) -> None:
    with pytest.raises(ConfigError, match="exchange_timeout_s"):
        EngineConfig.resolve({"model": target(), "exchange_timeout_s": value})


def test_a_step_outlasts_the_wait_for_dedicated_drafters(target: Save, drafter: Save) -> None:
    """A step begins behind the exchange of the one before it: were its deadline shorter, drafters
    that don't answer would cost the target's ranks too."""
    speculative = {"method": "dflash", "model": drafter(), "placement": "dedicated"}
    args = {"model": target(), "speculative_config": speculative, "max_model_len": 64}
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.resolve({**args, "step_timeout_s": 20.0, "exchange_timeout_s": 20.0})
    for word in ("exchange_timeout_s", "20", "step_timeout_s"):
        assert word in str(refusal.value)
    EngineConfig.resolve({**args, "step_timeout_s": 20.0, "exchange_timeout_s": 5.0})


@pytest.mark.parametrize("dedicated", [False, True])
def test_a_page_budget_is_that_of_the_rank_that_keeps_most(
    target: Save, drafter: Save, dedicated: bool
) -> None:
    """Colocated, a rank keeps 1 of 2 heads of 4 target layers and 1 draft layer; dedicated, that of
    the target alone, or 2 heads of the draft layer."""
    heads = max(4, 2) if dedicated else 4 + 1
    page = 16 * 2 * 4 * 4 * heads  # tokens, K and V, values, bytes
    placed = {"placement": "dedicated"} if dedicated else {}
    config = EngineConfig.resolve(
        {
            "model": target(),
            "tensor_parallel_size": 2,
            "speculative_config": {"method": "dflash", "model": drafter(), **placed},
            "kv_cache_memory_bytes": 20 * page + page - 1,
            "dtype": "float32",
        }
    )
    assert config.num_kv_pages == 20
