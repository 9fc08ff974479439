"""The thread that is a CPU's device queue: work runs first-in first-out, one piece at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, TypeVar

import torch

T = TypeVar("T")


class DeviceThread:
    """Shared by the engines of a process that use equally many threads: a process has one CPU.

    Two threads would each have a pool of helpers, and OpenMP lets helpers that outnumber the cores
    sleep at once, which makes a step half as fast again (docs/decisions.md).
    """

    _shared: ClassVar[dict[int, "DeviceThread"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, num_threads: int) -> None:
        """Use `acquire`."""
        self._num_threads, self._num_users = num_threads, 0
        self._queue = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="device",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    @classmethod
    def acquire(cls, num_threads: int) -> "DeviceThread":
        """The device whose operations use `num_threads`; whoever acquires it releases it."""
        with cls._lock:
            device = cls._shared.setdefault(num_threads, cls(num_threads))
            device._num_users += 1
            return device

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Enqueue `work`; it runs without gradients. The future raises what the work raised."""
        return self._queue.submit(_without_grad, work)

    def release(self) -> None:
        """Finish what was submitted; the last user's release ends the thread."""
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
            if last:
                del self._shared[self._num_threads]
        if last:
            self._queue.shutdown(wait=True)
        else:
            self.submit(lambda: None).result()


def _without_grad(work: Callable[[], T]) -> T:
    # Grad mode is thread-local, so it has to be set where the work runs.
    with torch.inference_mode():
        return work()
