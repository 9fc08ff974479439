"""Puts an engine's shards on the cluster and drives them with actor calls.

Not with a compiled graph: its channel reads spin, so a shard that waits for its next plan and a
router that waits for an output each keep a core busy, which are the cores a CPU shard computes
with (docs/decisions.md has the measurement). What a plain call costs more is a fraction of a step.
"""

import logging
import os

import ray
from ray.actor import ActorProxy
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
    """A shard as an actor: it answers `ping` during a step."""

    @ray.method(concurrency_group="health")
    def ping(self) -> int:
        return super().ping()


class RayShardGroup:
    """A `ShardGroup` of Ray actors, one per rank."""

    def __init__(self, config: EngineConfig, group: PlacementGroup) -> None:
        """Place and load every rank. Raises what a rank raised, with all ranks ended."""
        self._config = config
        # Until `seal`, a step may compile.
        self._timeout_s = config.warm_up_timeout_s
        actor = ray.remote(concurrency_groups={"health": 1})(_RayShard)
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
        except BaseException:
            self.close()
            raise

    def step(self, payload: bytes) -> bytes:
        """See `ShardGroup.step`; every rank computes the same output, rank 0's is returned.

        Raises `ray.exceptions.RayError` where a rank died or missed its deadline, or what a rank's
        step raised.
        """
        outputs = [shard.step.remote(payload) for shard in self.actors]
        # All are waited for: a dead rank shows here, not as a step of the others that never ends.
        results: list[bytes] = ray.get(outputs, timeout=self._timeout_s)
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
