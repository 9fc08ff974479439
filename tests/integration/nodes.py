"""Clusters of several nodes on this machine: each is a raylet with its own address on loopback."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from actors.bundles import bundles
from actors.config import EngineConfig
from actors.engine import Engine
from actors.llm import LLM
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from actors.placement import RayShardGroup

Pair = tuple[Path, Path]
PROMPT = list(range(20, 31))
# The values of docs/configuration.md for clusters of several nodes.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}


def tiny_args(pair: Pair, **changes: Any) -> dict[str, Any]:
    """Of an engine whose shards need a NeuronCore each."""
    return {
        "model": str(pair[0]),
        "served_model_name": "tiny",
        "speculative_config": {"method": "dflash", "model": str(pair[1])},
        "max_model_len": 2048,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "dtype": "float32",
        "threads_per_shard": 1,
        "backend": "eager",
        "cpus_per_shard": 1.0,
        "neuron_cores_per_shard": 1,
        **changes,
    }


class Nodes:
    """A running cluster, to which this process is connected."""

    def __init__(self, temp_dir: str) -> None:
        self.cluster = Cluster(shutdown_at_exit=False)
        # 127.0.0.1 would count as no address.
        self._next = 11
        self.add(2, _first={"temp_dir": temp_dir, "include_dashboard": False})
        ray.init(address=self.cluster.address, log_to_driver=False)

    def add(
        self, num_cpus: int, neuron_cores: int = 0, *, _first: dict[str, Any] | None = None
    ) -> Any:
        """Another node; its `node_ip_address` is an address that no other has."""
        address, self._next = f"127.0.0.{self._next}", self._next + 1
        return self.cluster.add_node(
            node_ip_address=address,
            num_cpus=num_cpus,
            resources={"neuron_cores": neuron_cores} if neuron_cores else {},
            object_store_memory=100 << 20,
            **(_first or {}),
        )

    def kill(self, node: Any) -> None:
        """As where its machine is gone: the raylet, and every process it started."""
        (raylet,) = node.all_processes["raylet"]
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def cluster() -> Iterator[Nodes]:
    """A cluster whose first node has two CPUs and no NeuronCores."""
    before = {name: os.environ.get(name) for name in HEALTH_CHECKS}
    os.environ.update(HEALTH_CHECKS)
    with tempfile.TemporaryDirectory(prefix="dfn", ignore_cleanup_errors=True) as temp_dir:
        nodes = None
        try:
            nodes = Nodes(temp_dir)
            yield nodes
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            if nodes is not None:
                serve.shutdown()
                ray.shutdown()
                nodes.cluster.shutdown()


@contextmanager
def placed(config: EngineConfig) -> Iterator[RayShardGroup]:
    """The shards of an engine, without a router in front."""
    group = placement_group(bundles(config), strategy=config.placement_strategy)
    try:
        shards = RayShardGroup(config, group)
        try:
            yield shards
        finally:
            shards.close()
    finally:
        remove_placement_group(group)


def expected_tokens(
    args: dict[str, Any], prompt: Sequence[int], max_tokens: int
) -> tuple[int, ...]:
    """What one rank in this process makes of `prompt` without speculation."""
    plain = {
        "speculative_config": None,
        "neuron_cores_per_shard": None,
        "tensor_parallel_size": 1,
    }
    with LLM(**args | plain) as llm:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([list(prompt)], sampling)
    return output.token_ids


def tokens_from(
    config: EngineConfig, shards: RayShardGroup, prompt: Sequence[int], max_tokens: int
) -> tuple[int, ...]:
    """What an engine of this process makes of `prompt` on `shards`."""
    chunks: list[TokenChunk] = []
    engine = Engine(config, shards, chunks.extend)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add_all(
        [GenerateRequest(request_id="only", prompt_token_ids=tuple(prompt), sampling=sampling)]
    )
    while engine.step():
        pass
    engine.close()
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def seats(shards: RayShardGroup) -> list[tuple[str, str | None]]:
    """Of each rank, its node's address and what it sees of the node's NeuronCores."""
    return ray.get(
        [
            shard.__ray_call__.remote(
                lambda _: (
                    ray.util.get_node_ip_address(),
                    os.environ.get("NEURON_RT_VISIBLE_CORES"),
                )
            )
            for shard in shards.actors
        ]
    )


def groups_left() -> list[str]:
    """States of the placement groups that are not removed."""
    states = [table["state"] for table in placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


def shards_left() -> list[int]:
    """Processes of shards, of clusters that this process started."""
    children = psutil.Process().children(recursive=True)
    return [process.pid for process in children if "_RayShard" in _line(process)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
