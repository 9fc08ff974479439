"""Puts an engine's shards on the cluster and drives them.

Ray starts and ends them; their steps go over sockets (`actors.channel`), since an actor call and a
compiled graph, whose readers spin, both take a core's time that a CPU shard computes with.
"""

import logging
import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors import ranks
from actors.bundles import shard_resources
from actors.channel import Address, StepChannels, StepServer
from actors.cluster import wait_for
from actors.config import EngineConfig
from actors.drafter_shard import DrafterShard
from actors.drafters import RayDrafters
from actors.rank import Rank
from actors.shard import Shard

logger = logging.getLogger(__name__)

_SPIN_COUNT = os.environ.get("GOMP_SPINCOUNT", "200000")


class _RayRank(Rank):
    """What ranks can do as actors. Their steps do not come through Ray."""

    def listen(self, driver_node_id: str) -> Address:
        """Where its steps are taken: not open to other machines where the driver is on this one."""
        is_near = ray.get_runtime_context().get_node_id() == driver_node_id
        host = "127.0.0.1" if is_near else self.node_address()
        self._server = StepServer(self.step, host, self.is_compiling)
        return self._server.address

    def node_address(self) -> str:
        """Where other nodes reach this rank's."""
        address: str = ray.util.get_node_ip_address()
        return address


class _RayShard(_RayRank, Shard):
    pass


class _RayDrafterShard(_RayRank, DrafterShard):
    pass


class RayShardGroup:
    """A `ShardGroup` of Ray actors, one per rank."""

    def __init__(self, config: EngineConfig, group: PlacementGroup) -> None:
        """Place every rank, once there is room, and load those of the target; dedicated drafters
        load meanwhile. Raises what a rank raised, with all ranks ended."""
        wait_for(group, config)
        self._config, self._group = config, group
        # Until `seal`, a step may compile.
        self._timeout_s = config.warm_up_timeout_s
        self._channels: StepChannels | None = None
        self.drafters: RayDrafters | None = None
        size = config.tensor_parallel_size
        self.actors = [self._place(_RayShard, rank, 1 + rank) for rank in range(size)]
        try:
            if config.is_dedicated:
                self.drafters = RayDrafters(config, self._place_drafters, self.actors)
            self._load()
        except BaseException:
            self.close()
            raise

    def step(self, payload: bytes) -> bytes:
        """See `ShardGroup.step`; every rank computes the same output, rank 0's is returned.

        Raises `StepFailed` where a rank died or raised, `TimeoutError` where it was too slow.
        """
        assert self._channels is not None
        if self.drafters is not None:
            self.drafters.post(payload)
        results = self._channels.step(payload, self._timeout_s)
        if any(result != results[0] for result in results):
            raise RuntimeError("ranks disagree about what a step emitted")
        return results[0]

    def seal(self) -> None:
        """See `ShardGroup.seal`; the deadline of a step is that of steps that compile nothing."""
        ray.get([shard.seal.remote() for shard in self.actors], timeout=self._config.step_timeout_s)
        self._timeout_s = self._config.step_timeout_s

    def close(self) -> None:
        """Kill every rank: one that waits in a collective for a dead peer would never end."""
        actors, self.actors = self.actors, []
        ranks.kill(actors)
        if self._channels is not None:
            self._channels.hang_up()
        if self.drafters is not None:
            self.drafters.close()

    def _load(self) -> None:
        timeout_s = self._config.load_timeout_s
        ranks.load(self.actors, timeout_s)
        node_id = ray.get_runtime_context().get_node_id()
        self._channels = StepChannels(
            ray.get([shard.listen.remote(node_id) for shard in self.actors], timeout=timeout_s)
        )

    def _place_drafters(self) -> list[Any]:
        first = 1 + self._config.tensor_parallel_size
        return [
            self._place(_RayDrafterShard, rank, first + rank)
            for rank in range(self._config.drafter_parallel_size)
        ]

    def _place(self, kind: type[_RayRank], rank: int, bundle: int) -> Any:
        """A rank's actor, in its bundle; not loaded."""
        return (
            ray.remote(kind)
            .options(
                num_cpus=self._config.cpus_per_shard,
                resources=shard_resources(self._config),
                max_restarts=0,
                # How long threads wait awake for each other at the end of a parallel region; read
                # once, when the worker loads torch (docs/decisions.md).
                runtime_env={"env_vars": {"GOMP_SPINCOUNT": _SPIN_COUNT}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote(self._config, rank)
        )
