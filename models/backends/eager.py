"""The eager backend: plain torch, run first-in first-out on one device thread. For debugging."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from models.backends.backend import Region
from models.backends.device_thread import DeviceThread
from models.ops import Ops, TorchOps
from models.parallel import TensorParallel

T = TypeVar("T")

_GROUP_TIMEOUT = timedelta(minutes=10)


class EagerBackend:
    """Submitting work only enqueues it, as on an accelerator; the future's result waits for it."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` is how many threads a step's tensor operations use."""
        self.ops: Ops = TorchOps()
        self.late_compiles = 0
        self._device: DeviceThread | None = DeviceThread.acquire(num_threads)

    def init_rank(self, rank: int, size: int, rendezvous: str | None) -> TensorParallel:
        """See `Backend.init_rank`; ranks meet over gloo."""
        if size == 1:
            return TensorParallel()
        assert rendezvous is not None
        if rendezvous.startswith("127."):
            # Left alone, gloo would take the interface that the host's name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=_GROUP_TIMEOUT,
        )
        return TensorParallel(rank, size, dist.group.WORLD)

    def compile(self, region: Region) -> Region:
        """The region as it is."""
        return region

    def weights_loaded(self) -> None:
        """Nothing is to be done."""

    def seal(self) -> None:
        """Nothing is ever compiled."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """See `Backend.submit`."""
        if self._device is None:
            raise RuntimeError("the backend was closed")
        return self._device.submit(work)

    def close(self) -> None:
        """See `Backend.close`."""
        device, self._device = self._device, None
        if device is not None:
            device.release()
        if dist.is_initialized():
            dist.destroy_process_group()
