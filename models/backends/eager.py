"""The eager CPU backend: steps run first-in first-out on one device thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class EagerBackend:
    """Submitting work only enqueues it, as on an accelerator; the future's result waits for it."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` is how many threads a step's tensor operations use."""
        self._device = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="device",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Enqueue `work`; it runs without gradients, after everything submitted before it.

        The future raises what the work raised.
        """
        return self._device.submit(_without_grad, work)

    def close(self) -> None:
        """Finish what was submitted and end the device thread."""
        self._device.shutdown(wait=True)


def _without_grad(work: Callable[[], T]) -> T:
    # Grad mode is thread-local, so it has to be set where the work runs.
    with torch.inference_mode():
        return work()
