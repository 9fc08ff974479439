"""The eager backend: plain torch, run first-in first-out on one device thread. For debugging."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from models.backends import gloo
from models.backends.backend import Region, Rendezvous
from models.backends.device_thread import DeviceThread
from models.ops import Ops, TorchOps
from models.parallel import TensorParallel

T = TypeVar("T")


class EagerBackend:
    """Submitting work only enqueues it, as on an accelerator; the future's result waits for it."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` is how many threads a step's tensor operations use."""
        self.ops: Ops = TorchOps()
        self.late_compiles = 0
        self.is_compiling = False
        self._device: DeviceThread | None = DeviceThread.acquire(num_threads)

    def init_rank(self, rank: int, size: int, rendezvous: Rendezvous | None) -> TensorParallel:
        """See `Backend.init_rank`; ranks meet over gloo."""
        if size == 1:
            return TensorParallel()
        assert rendezvous is not None
        return TensorParallel(rank, size, gloo.join(rank, size, rendezvous))

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
