"""What a rank asks of the machine it computes on."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from socket import socket
from typing import Protocol, TypeVar

from models.ops import Ops
from models.parallel import TensorParallel

T = TypeVar("T")
Region = TypeVar("Region", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ranks meet: the `host:port` of their store, and what this rank brings there.

    `host` is the address of this rank's machine that the others reach. Rank 0 may have a `listener`
    at `address` already, which the store takes over.
    """

    address: str
    host: str = "127.0.0.1"
    listener: socket | None = None


class Backend(Protocol):
    """One rank's device: a queue of work, kernels, and a compiler for regions of a step.

    `late_compiles` counts regions compiled after `seal`: there should be none. `is_compiling` says
    whether one is being compiled now.
    """

    ops: Ops
    late_compiles: int
    is_compiling: bool

    def init_rank(self, rank: int, size: int, rendezvous: Rendezvous | None) -> TensorParallel:
        """Join the other ranks' process group at `rendezvous`; needed only with several."""

    def compile(self, region: Region) -> Region:
        """`region` compiled for every set of shapes it is called with, at the first such call."""

    def weights_loaded(self) -> None:
        """Every weight is where it stays; nothing has been reserved for KV yet."""

    def seal(self) -> None:
        """Everything has been compiled: from now on a new compilation is a defect."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Enqueue `work`; it runs without gradients, after everything submitted before it.

        The future raises what the work raised.
        """

    def close(self) -> None:
        """Finish what was submitted, end the device thread and leave the process group."""
