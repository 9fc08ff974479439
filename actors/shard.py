"""One rank of an engine: target rank and colocated drafter rank in one process."""

import os
import socket
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file

from actors.config import EngineConfig
from actors.limits import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from actors.messages import StepPlan, decode_plan, encode
from actors.shard_inputs import step_inputs, write_page_updates, write_samplings
from actors.shard_outputs import HostResult, on_host, step_output
from actors.trace import DEVICE, Trace
from models.backends.backend import Backend
from models.backends.cpu import CpuBackend
from models.backends.eager import EagerBackend
from models.kv_cache import allocate
from models.registry import DRAFTERS, TARGETS
from models.scoring import next_token_logits
from models.slot_sampling import SamplingState
from models.state import SlotState
from models.steps import ModelRank, Regions
from models.weights import CheckpointReader


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    result: "Future[HostResult]"


class Shard:
    """A plain class: `actors.placement` makes it a Ray actor, `actors.llm` uses it as it is."""

    def __init__(self, config: EngineConfig, rank: int, *, trace: Trace | None = None) -> None:
        """`trace` gets a span for every step, on the device's track."""
        self._trace = trace
        self._config = config
        self._rank = rank
        self._num_threads = config.threads_per_shard or _equal_share(config.tensor_parallel_size)
        self._backend = _backend(config, self._num_threads)
        self._model: ModelRank | None = None
        self._in_flight: _InFlight | None = None
        self.bytes_read = 0

    def rendezvous(self, host: str = "127.0.0.1") -> str:
        """A free `host:port` of this rank's machine, for the ranks' process group to meet at."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def load(self, rendezvous: str | None = None) -> None:
        """Join the other ranks and load this rank's slices; `rendezvous` is needed with several.

        Raises `CheckpointRefused` where a checkpoint does not hold what its config promises.
        """
        if self._config.pin_threads:
            self._backend.submit(self._pin).result()
        self._backend.submit(lambda: self._load(rendezvous)).result()

    def step(self, payload: bytes) -> bytes:
        """Submit the plan in `payload`, then return the output of the step before it.

        An empty plan submits nothing, and so drains the pipeline. Raises what the step raised.
        """
        plan = decode_plan(payload)
        previous, self._in_flight = self._in_flight, self._submit(plan)
        if previous is None:
            return encode(None)
        result = previous.result.result()
        return encode(step_output(previous.plan, result, self._backend.late_compiles))

    def seal(self) -> None:
        """Warm-up is over: what is compiled from now on is counted, or refused."""
        self._backend.seal()

    def ping(self) -> int:
        """This rank's process id: the process is there, whatever its device thread does."""
        return os.getpid()

    def close(self) -> None:
        """Finish what was submitted and let go of the device."""
        self._backend.close()

    def next_token_logits(self, token_ids: list[int]) -> torch.Tensor:
        """This rank's logits `[vocab]` behind `token_ids`, computed apart from all requests.

        For judging near-ties; only for a single rank, and not while a step is in flight.
        """
        assert self._config.tensor_parallel_size == 1
        assert self._model is not None, "load() first"
        target = self._model.target
        return self._backend.submit(lambda: next_token_logits(target, token_ids)).result()

    def _submit(self, plan: StepPlan) -> _InFlight | None:
        if plan.bucket is None:
            return None
        assert self._model is not None, "load() first"
        model = self._model

        # Made here, while the device is still at the step before.
        with torch.inference_mode():
            inputs = step_inputs(plan, model.state.scratch_slot, model.vocab_size)
        captured: dict[str, torch.Tensor] | None = {} if self._config.debug_logits_dir else None

        def work() -> HostResult:
            with self._span(plan.step):
                write_page_updates(plan, model.state)
                write_samplings(plan, model.sampling)
                result = model.step(inputs, captured)
            if captured is not None:
                self._save(plan.step, captured)
            return on_host(result)

        return _InFlight(plan, self._backend.submit(work))

    def _save(self, step: int, captured: dict[str, torch.Tensor]) -> None:
        """See `debug_logits_dir` in docs/configuration.md."""
        directory = self._config.debug_logits_dir
        assert directory is not None
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: values.contiguous() for name, values in captured.items()}
        save_file(tensors, directory / f"step{step:06d}-rank{self._rank}.safetensors")

    def _pin(self) -> None:
        """Keep the device thread, and the helpers it will start, on this rank's cores."""
        cores = sorted(os.sched_getaffinity(0))
        first = self._rank * self._num_threads
        own = cores[first : first + self._num_threads]
        if len(own) < self._num_threads:
            raise ValueError(
                f"pin_threads: rank {self._rank} needs {self._num_threads} cores from the "
                f"{first + 1}th on, the process has {len(cores)}"
            )
        os.sched_setaffinity(0, own)

    def _span(self, step: int) -> AbstractContextManager[Any]:
        return self._trace.span("step", DEVICE, step=step) if self._trace else nullcontext()

    def _load(self, rendezvous: str | None) -> None:
        config, backend = self._config, self._backend
        tp = backend.init_rank(self._rank, config.tensor_parallel_size, rendezvous)
        dtype = getattr(torch, config.dtype)
        drafter_config = config.drafter
        with ExitStack() as files:
            reader = files.enter_context(CheckpointReader(config.target_path))
            target = TARGETS[config.target.architecture](
                config.target,
                tp,
                reader,
                dtype=dtype,
                num_positions=config.max_model_len,
                capture_layer_ids=drafter_config.capture_layer_ids if drafter_config else (),
                ops=backend.ops,
            )
            self.bytes_read = reader.bytes_read
            drafter = None
            specs = target.kv_specs()
            if drafter_config is not None and config.drafter_path is not None:
                reader = files.enter_context(CheckpointReader(config.drafter_path))
                drafter = DRAFTERS[drafter_config.architecture](
                    drafter_config,
                    tp,
                    reader,
                    target,
                    dtype=dtype,
                    num_positions=config.max_model_len,
                )
                self.bytes_read += reader.bytes_read
                drafter.bind()
                drafter.pack()
                specs += drafter.kv_specs()
        target.pack()
        backend.weights_loaded()
        pools = allocate(specs, config.num_kv_pages, config.block_size)
        num_layers = config.target.decoder.num_layers
        self._model = ModelRank(
            target=target,
            drafter=drafter,
            regions=Regions.of(drafter, backend.compile),
            target_kv=pools[:num_layers],
            drafter_kv=pools[num_layers:],
            state=SlotState.allocate(config.num_slots, config.num_drafts, config.pages_per_request),
            sampling=SamplingState.allocate(
                config.num_slots,
                num_positions=config.max_model_len,
                num_edits=MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + len(config.target.eos_token_ids),
                num_bad_words=MAX_BAD_SEQUENCES,
                bad_word_length=MAX_BAD_WORD_TOKENS,
            ),
            vocab_size=config.target.vocab_size,
        )


def _backend(config: EngineConfig, num_threads: int) -> Backend:
    if config.backend == "eager":
        return EagerBackend(num_threads)
    return CpuBackend(num_threads, exact=config.exact, strict=config.late_compile == "error")


def _equal_share(num_shards: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // num_shards)
