"""The ranks' process group over gloo: every rank listens on an address of its own machine only."""

import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import Backend, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from models.backends.backend import Rendezvous

_TIMEOUT = timedelta(minutes=10)
# torch's own `gloo` takes no options, and listens where the host's name resolves to.
_NAME = "gloo_on_host"


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket for the ranks' store, at `host` only. Port 0 is one that is free, and ours from now
    on: nobody takes it before the store is there."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, port))
    listener.listen()
    return listener


def open_store(listener: socket.socket, host: str) -> TCPStore:
    """A store that takes over a socket of `listen`."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join(rank: int, size: int, rendezvous: Rendezvous) -> dist.ProcessGroup:
    """The group of all ranks, made this process's default group; returns once all have joined.

    Rank 0 keeps the store, and gives it `rendezvous.listener` where there is one.
    """
    host, _, port = rendezvous.address.rpartition(":")
    if rank == 0:
        store = open_store(rendezvous.listener or listen(host, int(port)), host)
    else:
        store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    if _NAME not in Backend.backend_list:
        Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    options = _listening_on(rendezvous.host)
    dist.init_process_group(
        _NAME, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, pg_options=options
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def group_apart(
    store: TCPStore, host: str, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A group beside the default one, of ranks that may be in none of the same; returns once all
    have come to `store`. Raises `RuntimeError` where they don't."""
    options = _listening_on(host)
    options._timeout = timeout
    group: Any = ProcessGroupGloo(store, rank, size, options)
    return cast(dist.ProcessGroup, group)


def _listening_on(host: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return options


def _create(parts: Any, options: Any) -> ProcessGroupGloo:
    options._timeout = parts.timeout
    return ProcessGroupGloo(parts.store, parts.group_rank, parts.group_size, options)
