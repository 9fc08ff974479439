"""What every rank of an engine is: a process with a device, beside others of its kind."""

import os
from socket import socket

import torch
from safetensors.torch import save_file

from actors.config import EngineConfig
from models.backends import gloo
from models.backends.backend import Backend, Rendezvous
from models.backends.cpu import CpuBackend
from models.backends.eager import EagerBackend


class Rank:
    """A plain class: `actors.placement` makes its kinds Ray actors, `actors.llm` uses one as it
    is."""

    def __init__(self, config: EngineConfig, rank: int, place: int) -> None:
        """`rank` counts those that this one shares a model with, `place` all of the engine."""
        self._config = config
        self._rank, self._place = rank, place
        self._num_threads = config.threads_per_shard or _equal_share(config.num_ranks)
        self._backend = _backend(config, self._num_threads)
        self._listener: socket | None = None

    def rendezvous(self, host: str = "127.0.0.1") -> str:
        """A `host:port` of this rank's machine, for its kind's process group to meet at.

        Called on the first rank, which listens there from now on.
        """
        self._listener = gloo.listen(host)
        return f"{host}:{self._listener.getsockname()[1]}"

    def load(self, rendezvous: str | None = None, host: str = "127.0.0.1") -> None:
        """Join the other ranks and load this rank's slices.

        `rendezvous` is needed with several ranks; `host` is the address of this rank's machine that
        the others reach.

        Raises `CheckpointRefused` where a checkpoint does not hold what its config promises.
        """
        if self._config.pin_threads:
            self._backend.submit(self._pin).result()
        meeting = None
        if rendezvous is not None:
            listener, self._listener = self._listener, None
            meeting = Rendezvous(rendezvous, host, listener)
        self._backend.submit(lambda: self._load(meeting)).result()

    def step(self, payload: bytes) -> bytes:
        """Take part in the step that the encoded `StepPlan` in `payload` says."""
        raise NotImplementedError

    def seal(self) -> None:
        """Warm-up is over: what is compiled from now on is counted, or refused."""
        self._backend.seal()

    def is_compiling(self) -> bool:
        """Whether a step takes long for that reason."""
        return self._backend.is_compiling

    def ping(self) -> int:
        """This rank's process id: the process is there, whatever its device thread does."""
        return os.getpid()

    def close(self) -> None:
        """Finish what was submitted and let go of the device."""
        self._backend.close()

    def _load(self, rendezvous: Rendezvous | None) -> None:
        raise NotImplementedError

    def _save(self, name: str, captured: dict[str, torch.Tensor]) -> None:
        """See `debug_logits_dir` in docs/configuration.md."""
        directory = self._config.debug_logits_dir
        assert directory is not None
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: values.contiguous() for name, values in captured.items()}
        save_file(tensors, directory / f"{name}.safetensors")

    def _pin(self) -> None:
        """Keep the device thread, and the helpers it will start, on this rank's cores."""
        cores = sorted(os.sched_getaffinity(0))
        first = self._place * self._num_threads
        own = cores[first : first + self._num_threads]
        if len(own) < self._num_threads:
            raise ValueError(
                f"pin_threads: rank {self._place} needs {self._num_threads} cores from the "
                f"{first + 1}th on, the process has {len(cores)}"
            )
        os.sched_setaffinity(0, own)


def _backend(config: EngineConfig, num_threads: int) -> Backend:
    if config.backend == "eager":
        return EagerBackend(num_threads)
    return CpuBackend(num_threads, exact=config.exact, strict=config.late_compile == "error")


def _equal_share(num_ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
