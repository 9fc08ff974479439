"""What a user may set of an engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.capacity import Strategy


class Frozen(BaseModel):
    """Constant, strict, and closed to unknown fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class SpeculativeConfig(Frozen):
    """`method` is `dflash`. `num_speculative_tokens` defaults to the drafter's block_size - 1.

    An `adaptive` engine verifies as many of them per step as its own measurements say is fastest,
    at high load none; otherwise it always verifies all. Tokens are the same either way.

    The ranks of a `colocated` drafter live in those of the target. A `dedicated` one has
    `tensor_parallel_size` (default 1) ranks of its own, whose loss costs speed and nothing else.
    It may `overlap`: draft for one half of a batch while the other half is verified; `auto` does so
    where that was measured to be faster.
    """

    method: Literal["dflash"]
    model: str
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    adaptive: bool = True
    placement: Literal["colocated", "dedicated"] = "colocated"
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    overlap: Literal["auto", "always", "never"] = "auto"


class BucketArgs(Frozen):
    """The sizes that steps are padded to; None chooses. Each list ascends and must reach what the
    configuration allows: `decode_sequences` max_num_seqs, `verify_widths` (tokens a row verifies)
    the drafter's block_size, `context_lengths` (tokens) max_model_len. A chunk of a prompt is cut
    into rows of one of `prefill_widths`. Everything is compiled for every size once, so fewer
    sizes start sooner and pad more.
    """

    decode_sequences: list[int] | None = None
    verify_widths: list[int] | None = None
    prefill_widths: list[int] | None = None
    context_lengths: list[int] | None = None


class EngineArgs(Frozen):
    """What a user may set; every name is vLLM's where vLLM has one.

    `model` is the demo's name, a local directory or a Hugging Face id. `block_size` is the number
    of tokens in a KV page. `num_kv_pages` or `kv_cache_memory_bytes` sizes the KV pools of one
    rank. `cpus_per_shard` and `threads_per_shard` apply to CPU shards: the first is what Ray
    reserves, the second how many threads a shard computes with (default: an equal share).
    `pin_threads` keeps each rank of an engine on cores of its own, counted from the first: for one
    engine per machine. A shard with `neuron_cores_per_shard` has so many NeuronCores to itself.
    `placement_strategy` is Ray's: STRICT_PACK puts the whole engine on one node, PACK on as few as
    there is room on, SPREAD on as many as there are. An engine that the cluster's nodes could never
    hold is refused; with `wait_for_nodes` it waits for others. `step_timeout_s` is how long a shard
    may take for one step before it counts as wedged, `warm_up_timeout_s` the same for a step of
    warm-up, which compiles, and `load_timeout_s` for placing the shards and reading the weights;
    `exchange_timeout_s` how long a step waits for dedicated drafters before it goes on without
    them.
    `async_scheduling` plans and submits a step before the output of the one before it was read.
    `enable_prefix_caching` shares the KV of equal beginnings of prompts between requests.
    A served stream gets its tokens every `stream_interval_s`, the first and last at once; 0 sends
    them with every step.

    `backend` cpu compiles, eager (for debugging) does not. `exact` makes what a request gets
    independent, to the bit, of what runs beside it; None is true with backend cpu.
    `late_compile` says whether compiling after warm-up is logged or an error. With
    `debug_logits_dir` every step writes its logits there. `profile_num_layers` runs only so many
    of the target's layers, for profiling: the text is not meaningful.
    """

    model: str = Field(min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    speculative_config: SpeculativeConfig | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=8, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=16)
    block_size: int = Field(default=16, ge=1)
    num_kv_pages: int | None = Field(default=None, ge=2)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    cpus_per_shard: float = Field(default=0.5, ge=0.0001)
    threads_per_shard: int | None = Field(default=None, ge=1)
    pin_threads: bool = False
    neuron_cores_per_shard: int | None = Field(default=None, ge=1)
    placement_strategy: Strategy = "STRICT_PACK"
    wait_for_nodes: bool = False
    step_timeout_s: float = Field(default=120.0, gt=0)
    backend: Literal["auto", "cpu", "eager"] = "auto"
    exact: bool | None = None
    late_compile: Literal["log", "error"] = "log"
    warm_up_timeout_s: float = Field(default=600.0, gt=0)
    load_timeout_s: float = Field(default=1800.0, gt=0)
    exchange_timeout_s: float = Field(default=30.0, gt=0)
    buckets: BucketArgs = BucketArgs()
    debug_logits_dir: str | None = Field(default=None, min_length=1)
    profile_num_layers: int | None = Field(default=None, ge=1)
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    # Ten messages a second read as a flow, and leave the cores to the model.
    stream_interval_s: float = Field(default=0.1, ge=0)
