"""Puts an engine's shards on the cluster and drives them.

Ray starts and ends them; their steps go over sockets (`actors.channel`), since an actor call and a
compiled graph, whose readers spin, both take a core's time that a CPU shard computes with.
"""

import logging
import os

import ray
from ray.actor import ActorProxy
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.channel import Address, StepChannels, StepServer
from actors.config import EngineConfig
from actors.shard import Shard

logger = logging.getLogger(__name__)

# The router itself mostly waits; its share only has to exist.
ROUTER_CPUS = 0.1
_SPIN_COUNT = os.environ.get("GOMP_SPINCOUNT", "200000")


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """One engine's placement group: the router in bundle 0, rank r in bundle 1 + r."""
    shard = {"CPU": config.cpus_per_shard}
    return [{"CPU": ROUTER_CPUS}, *[shard] * config.tensor_parallel_size]


class _RayShard(Shard):
    """A shard as an actor, whose steps do not come through Ray."""

    def listen(self, driver_node_id: str) -> Address:
        """Where its steps are taken: not open to other machines where the driver is on this one."""
        is_near = ray.get_runtime_context().get_node_id() == driver_node_id
        host = "127.0.0.1" if is_near else ray.util.get_node_ip_address()
        self._server = StepServer(self.step, host)
        return self._server.address


class RayShardGroup:
    """A `ShardGroup` of Ray actors, one per rank."""

    def __init__(self, config: EngineConfig, group: PlacementGroup) -> None:
        """Place and load every rank. Raises what a rank raised, with all ranks ended."""
        self._config = config
        # Until `seal`, a step may compile.
        self._timeout_s = config.warm_up_timeout_s
        self._channels: StepChannels | None = None
        actor = ray.remote(_RayShard)
        self.actors: list[ActorProxy[_RayShard]] = [
            actor.options(
                num_cpus=config.cpus_per_shard,
                max_restarts=0,
                # How long threads wait awake for each other at the end of a parallel region; read
                # once, when the worker loads torch (docs/decisions.md).
                runtime_env={"env_vars": {"GOMP_SPINCOUNT": _SPIN_COUNT}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=1 + rank
                ),
            ).remote(config, rank)
            for rank in range(config.tensor_parallel_size)
        ]
        try:
            rendezvous = None
            if len(self.actors) > 1:
                rendezvous = ray.get(
                    self.actors[0].rendezvous.remote(), timeout=config.load_timeout_s
                )
            ray.get(
                [shard.load.remote(rendezvous) for shard in self.actors],
                timeout=config.load_timeout_s,
            )
            node_id = ray.get_runtime_context().get_node_id()
            self._channels = StepChannels(
                ray.get(
                    [shard.listen.remote(node_id) for shard in self.actors],
                    timeout=config.step_timeout_s,
                )
            )
        except BaseException:
            self.close()
            raise

    def step(self, payload: bytes) -> bytes:
        """See `ShardGroup.step`; every rank computes the same output, rank 0's is returned.

        Raises `StepFailed` where a rank died or raised, `TimeoutError` where it was too slow.
        """
        assert self._channels is not None
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
        for shard in actors:
            try:
                ray.kill(shard)
            except ray.exceptions.RayError as error:  # the other ranks must go all the same
                logger.warning("a shard could not be killed: %s", error)
        if self._channels is not None:
            self._channels.hang_up()
