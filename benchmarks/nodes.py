"""A cluster of several nodes on this machine, whose worker nodes can be lost and replaced."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import psutil
from ray.cluster_utils import Cluster

# What docs/configuration.md advises for clusters of several nodes.
_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
_OBJECT_STORE_BYTES = 100 << 20


class Nodes:
    """A head node with room for what serves HTTP, and workers with room for one engine each."""

    def __init__(self, workers: int, cpus_per_worker: int) -> None:
        self._cluster = Cluster(shutdown_at_exit=False)
        self._cpus = cpus_per_worker
        # Addresses of loopback, but 127.0.0.1, which would count as none.
        self._next = 11
        self._workers: list[Any] = []
        try:
            self._add(1, include_dashboard=False)
            for _ in range(workers):
                self.add_worker()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """For RAY_ADDRESS."""
        address: str = self._cluster.address
        return address

    def add_worker(self) -> None:
        """One more; returns once it takes part."""
        self._workers.append(self._add(self._cpus))

    def kill_worker(self, running: str) -> None:
        """Kill a worker node where a process is `running` by this name, as if its machine were
        gone: its raylet and everything that started."""
        for node in self._workers:
            (raylet,) = node.all_processes["raylet"]
            children = psutil.Process(raylet.process.pid).children(recursive=True)
            if any(running in _line(child) for child in children):
                break
        else:
            raise LookupError(f"no worker node runs {running}")
        self._workers.remove(node)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End every node."""
        self._cluster.shutdown()

    def _add(self, num_cpus: int, **options: Any) -> Any:
        address, self._next = f"127.0.0.{self._next}", self._next + 1
        return self._cluster.add_node(
            node_ip_address=address,
            num_cpus=num_cpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            **options,
        )


@contextmanager
def cluster(workers: int, cpus_per_worker: int, environment: Mapping[str, str]) -> Iterator[Nodes]:
    """`Nodes` whose processes, and what these start, have this environment; its RAY_TMPDIR is where
    they keep their files."""
    with patch.dict(os.environ, {**environment, **_HEALTH_CHECKS}):
        nodes = Nodes(workers, cpus_per_worker)
        try:
            yield nodes
        finally:
            nodes.close()


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
