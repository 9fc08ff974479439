"""The engine's configuration: what a user writes (`EngineArgs`, with vLLM's names and `None` where
the engine should choose), checked and resolved before anything is placed.

`EngineConfig.resolve` reads both checkpoints' configs and fixes every choice once.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from actors.capacity import Strategy
from actors.engine_args import EngineArgs, Frozen
from actors.errors import ConfigError
from models import hub
from models.config import (
    DecoderConfig,
    DrafterConfig,
    TargetConfig,
    check_pairing,
    load_drafter_config,
    load_target_config,
    reduced,
)

DType = Literal["float32", "bfloat16"]

_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
_DEFAULT_KV_CACHE_BYTES = 2 << 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class Buckets(Frozen):
    """`BucketArgs`, every choice made."""

    decode_sequences: tuple[int, ...]
    verify_widths: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    context_lengths: tuple[int, ...]


class EngineConfig(Frozen):
    """Everything an engine needs to know, constant for its life. Made by `resolve` only.

    `num_slots` is how many requests have device state at once. `num_kv_pages` counts page 0, the
    null page, which no request owns.
    """

    served_model_name: str
    target_path: Path
    target: TargetConfig
    drafter_path: Path | None
    drafter: DrafterConfig | None
    adaptive_drafts: bool
    drafter_parallel_size: int
    is_dedicated: bool
    overlap: Literal["auto", "always", "never"]
    tensor_parallel_size: int
    dtype: DType
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_pages: int
    cpus_per_shard: float
    threads_per_shard: int | None
    pin_threads: bool
    neuron_cores_per_shard: int | None
    placement_strategy: Strategy
    wait_for_nodes: bool
    step_timeout_s: float
    backend: Literal["cpu", "eager"]
    exact: bool
    late_compile: Literal["log", "error"]
    warm_up_timeout_s: float
    load_timeout_s: float
    exchange_timeout_s: float
    buckets: Buckets
    debug_logits_dir: Path | None
    async_scheduling: bool
    enable_prefix_caching: bool
    stream_interval_s: float

    @classmethod
    def resolve(cls, args: Mapping[str, Any]) -> "EngineConfig":
        """Check `args` (the keys of `EngineArgs`) and both checkpoints, and fix every choice.

        Raises `ConfigError`, one line that names field, value and limit.
        """
        try:
            wanted = EngineArgs.model_validate(args)
            return cls._resolve(wanted)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(e) for e in error.errors())) from None
        except ConfigError:
            raise
        except ValueError as error:  # CheckpointNotFound, CheckpointRefused
            raise ConfigError(str(error)) from None

    @classmethod
    def _resolve(cls, args: EngineArgs) -> "EngineConfig":
        target_path = hub.resolve(args.model)
        target = load_target_config(target_path)
        drafter_path: Path | None = None
        drafter: DrafterConfig | None = None
        if args.speculative_config is not None:
            drafter_path = hub.resolve(args.speculative_config.model)
            drafter = load_drafter_config(drafter_path)
            num_drafts = args.speculative_config.num_speculative_tokens or drafter.num_drafts
            check_pairing(target, drafter, num_drafts)
        if args.profile_num_layers is not None:
            target, drafter = reduced(target, drafter, args.profile_num_layers)
        dtype = _dtype(args, target)
        backend = _backend(args)
        max_model_len = _max_model_len(args, target)
        num_kv_pages = _num_kv_pages(args, target, drafter, dtype, max_model_len)
        verify_rows = args.max_num_seqs * (drafter.block_size if drafter else 1)
        if args.max_num_batched_tokens < verify_rows:
            raise ConfigError(
                f"max_num_batched_tokens is {args.max_num_batched_tokens}, max_num_seqs "
                f"{args.max_num_seqs} needs at least {verify_rows}"
            )
        if args.pin_threads and args.placement_strategy != "STRICT_PACK":
            raise ConfigError(
                f"placement_strategy is {args.placement_strategy}, pin_threads needs STRICT_PACK: "
                "it counts the cores of one machine for all ranks"
            )
        return cls(
            served_model_name=args.served_model_name or args.model,
            target_path=target_path,
            target=target,
            drafter_path=drafter_path,
            drafter=drafter,
            adaptive_drafts=bool(args.speculative_config and args.speculative_config.adaptive),
            drafter_parallel_size=_drafter_parallel_size(args),
            is_dedicated=_is_dedicated(args),
            overlap=_overlap(args),
            tensor_parallel_size=args.tensor_parallel_size,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            num_kv_pages=num_kv_pages,
            cpus_per_shard=args.cpus_per_shard,
            threads_per_shard=args.threads_per_shard,
            pin_threads=args.pin_threads,
            neuron_cores_per_shard=args.neuron_cores_per_shard,
            placement_strategy=args.placement_strategy,
            wait_for_nodes=args.wait_for_nodes,
            step_timeout_s=args.step_timeout_s,
            backend=backend,
            exact=_exact(args, backend, dtype),
            late_compile=args.late_compile,
            warm_up_timeout_s=args.warm_up_timeout_s,
            load_timeout_s=args.load_timeout_s,
            exchange_timeout_s=_exchange_timeout_s(args),
            debug_logits_dir=Path(args.debug_logits_dir).absolute()
            if args.debug_logits_dir
            else None,
            buckets=_buckets(args, drafter.block_size if drafter else 1, max_model_len),
            async_scheduling=args.async_scheduling,
            enable_prefix_caching=args.enable_prefix_caching,
            stream_interval_s=args.stream_interval_s,
        )

    @property
    def num_ranks(self) -> int:
        """Processes of one engine, dedicated drafters included."""
        return self.tensor_parallel_size + self.is_dedicated * self.drafter_parallel_size

    @property
    def num_drafts(self) -> int:
        """K, the drafts a step verifies per request; 0 without speculation."""
        return self.drafter.num_drafts if self.drafter else 0

    @property
    def draft_end(self) -> int:
        """Where blocks may no longer begin: all of one is within the positions of the drafter."""
        if self.drafter is None:
            return 0
        return self.drafter.decoder.max_position_embeddings - self.drafter.num_drafts

    @property
    def num_slots(self) -> int:
        return self.max_num_seqs

    @property
    def pages_per_request(self) -> int:
        """The length of one row of the block table."""
        return -(-self.max_model_len // self.block_size)


def resolve_served(args: Mapping[str, Any]) -> tuple[EngineConfig, bool]:
    """The engine of an application's `args`, and whether gRPC is open to other machines.

    `args` are those of `EngineArgs`, and `remote_grpc` (default false): Serve's gRPC proxy has no
    authentication and always listens on every interface. Raises `ConfigError`, one line.
    """
    engine_args = dict(args)
    remote_grpc = engine_args.pop("remote_grpc", False)
    if not isinstance(remote_grpc, bool):
        raise ConfigError(f"remote_grpc: must be true or false (got {remote_grpc!r})")
    config = EngineConfig.resolve(engine_args)
    if not any((config.target_path / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"model: {config.target_path} holds no tokenizer ({' or '.join(_TOKENIZER_FILES)})"
        )
    return config, remote_grpc


def kv_bytes_per_page(
    decoders: Sequence[DecoderConfig], dtype: DType, block_size: int, tp: int
) -> int:
    """Bytes one page takes on one rank, in all layers of these decoders (heads padded)."""
    values = sum(2 * d.num_layers * -(-d.num_kv_heads // tp) * d.head_dim for d in decoders)
    return values * block_size * _DTYPE_BYTES[dtype]


def _is_dedicated(args: EngineArgs) -> bool:
    speculative = args.speculative_config
    return speculative is not None and speculative.placement == "dedicated"


def _exchange_timeout_s(args: EngineArgs) -> float:
    """A step must outlast its exchange, or silent drafters would cost the target's ranks too."""
    if _is_dedicated(args) and args.exchange_timeout_s >= args.step_timeout_s:
        raise ConfigError(
            f"exchange_timeout_s is {args.exchange_timeout_s:g}, it must be less than "
            f"step_timeout_s, {args.step_timeout_s:g}"
        )
    return args.exchange_timeout_s


def _overlap(args: EngineArgs) -> Literal["auto", "always", "never"]:
    speculative = args.speculative_config
    if speculative is None:
        return "never"
    if speculative.placement == "dedicated":
        return speculative.overlap
    if speculative.overlap == "always":
        raise ConfigError(
            "speculative_config.overlap is always, a colocated drafter can't compute beside its "
            "target; set placement: dedicated"
        )
    return "never"


def _drafter_parallel_size(args: EngineArgs) -> int:
    """0 without a drafter."""
    speculative = args.speculative_config
    if speculative is None:
        return 0
    wanted, target_size = speculative.tensor_parallel_size, args.tensor_parallel_size
    if speculative.placement == "dedicated":
        return wanted or 1
    if wanted not in (None, target_size):
        raise ConfigError(
            f"speculative_config.tensor_parallel_size is {wanted}; a colocated drafter has the "
            f"target's {target_size} ranks (or set placement: dedicated)"
        )
    return target_size


def _dtype(args: EngineArgs, target: TargetConfig) -> DType:
    if args.dtype != "auto":
        return args.dtype
    if target.dtype not in _DTYPE_BYTES:
        raise ConfigError(
            f"dtype is auto and the target's weights are {target.dtype}; set dtype to one of "
            f"{', '.join(_DTYPE_BYTES)}"
        )
    return "float32" if target.dtype == "float32" else "bfloat16"


def _backend(args: EngineArgs) -> Literal["cpu", "eager"]:
    if args.backend == "eager":
        return "eager"
    compiler = os.environ.get("CXX", "c++")
    # It may be a launcher and its compiler: `ccache g++`.
    if not compiler.strip() or shutil.which(compiler.split()[0]) is None:
        raise ConfigError(
            f"backend {args.backend} compiles for this machine and finds no C++ compiler "
            f"({compiler}); install one, name one in CXX, or set backend: eager"
        )
    return "cpu"


def _exact(args: EngineArgs, backend: str, dtype: DType) -> bool:
    if backend == "eager" and args.exact and dtype != "float32":
        raise ConfigError(
            f"exact is true, which backend eager can't promise in {dtype}; use backend: cpu or "
            "dtype: float32"
        )
    return args.exact if args.exact is not None else backend == "cpu"


def _buckets(args: EngineArgs, verify_width: int, max_model_len: int) -> Buckets:
    wanted = args.buckets
    sequences = _doublings(1, args.max_num_seqs)
    # The choices of `actors.speculation`: no drafts, a few of them, all.
    widths = tuple(sorted({1, (verify_width + 2) // 3, verify_width}))
    lengths = _doublings(4 * args.block_size, max_model_len)
    return Buckets(
        decode_sequences=_sizes(
            "decode_sequences", wanted.decode_sequences, sequences, args.max_num_seqs
        ),
        verify_widths=_sizes("verify_widths", wanted.verify_widths, widths, verify_width),
        prefill_widths=_sizes("prefill_widths", wanted.prefill_widths, (16, 64, 256), None),
        context_lengths=_sizes("context_lengths", wanted.context_lengths, lengths, max_model_len),
    )


def _doublings(first: int, last: int) -> tuple[int, ...]:
    sizes = [min(first << i, last) for i in range(last.bit_length() + 1)]
    return tuple(dict.fromkeys(sizes))


def _sizes(
    field: str, wanted: list[int] | None, default: tuple[int, ...], last: int | None
) -> tuple[int, ...]:
    """`wanted`, checked, or `default`."""
    if wanted is None:
        return default
    if not wanted or any(a >= b for a, b in zip([0, *wanted], wanted, strict=False)):
        raise ConfigError(f"buckets.{field} is {wanted}, not ascending sizes of at least 1")
    if last is not None and wanted[-1] != last:
        raise ConfigError(f"buckets.{field} ends with {wanted[-1]}, it must end with {last}")
    return tuple(wanted)


def _max_model_len(args: EngineArgs, target: TargetConfig) -> int:
    limit = target.decoder.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}, the target's max_position_embeddings "
            f"is {limit}"
        )
    return args.max_model_len or limit


def _num_kv_pages(
    args: EngineArgs,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    dtype: DType,
    max_model_len: int,
) -> int:
    per_request = -(-max_model_len // args.block_size)
    if args.num_kv_pages is not None and args.kv_cache_memory_bytes is not None:
        raise ConfigError("num_kv_pages and kv_cache_memory_bytes are both set; set one")
    if args.num_kv_pages is not None:
        num_pages = args.num_kv_pages
    else:
        budget = args.kv_cache_memory_bytes or _DEFAULT_KV_CACHE_BYTES
        page = _kv_bytes_per_page(args, target, drafter, dtype)
        num_pages = min(budget // page, args.max_num_seqs * per_request + 1)
    if num_pages < per_request + 1:
        raise ConfigError(
            f"the KV cache has {num_pages} pages, one request of max_model_len {max_model_len} "
            f"needs {per_request + 1} (null page included); raise num_kv_pages or "
            f"kv_cache_memory_bytes, or lower max_model_len"
        )
    return num_pages


def _kv_bytes_per_page(
    args: EngineArgs, target: TargetConfig, drafter: DrafterConfig | None, dtype: DType
) -> int:
    """On the rank that keeps most."""
    size, page = args.tensor_parallel_size, args.block_size
    if drafter is None or not _is_dedicated(args):
        decoders = [target.decoder] + ([drafter.decoder] if drafter else [])
        return kv_bytes_per_page(decoders, dtype, page, size)
    return max(
        kv_bytes_per_page([target.decoder], dtype, page, size),
        kv_bytes_per_page([drafter.decoder], dtype, page, _drafter_parallel_size(args)),
    )


def _describe(error: Any) -> str:
    """One pydantic error as `field: what is wrong (got value)`."""
    field = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown field (got {error['input']!r})"
    if error["type"] == "missing":
        return f"{field}: required"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{field}: {message} (got {error['input']!r})"
