"""Whether the running Ray cluster holds an engine: refuses, or waits and says for what."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors.bundles import NEURON_CORES, bundles
from actors.capacity import Resources, describe, shortage
from actors.config import EngineConfig
from actors.errors import ConfigError

logger = logging.getLogger("ray.serve")

# A wait is told of after so long, then each time after twice as long.
_FIRST_WORD_S = 5.0
_LONGEST_SILENCE_S = 300.0
_DECLARE = (
    "where Ray does not detect the cores (trn2, trn3), declare them: "
    "ray start --resources='{\"neuron_cores\": 64}'"
)


def refuse_impossible(config: EngineConfig) -> None:
    """Raises `ConfigError`, one line, where the cluster's nodes could never hold the engine, all
    else gone; not with `wait_for_nodes`, since others may come."""
    if config.wait_for_nodes:
        return
    wanted = bundles(config)
    lack = shortage(wanted, config.placement_strategy, _nodes("Resources"))
    if lack is None:
        return
    place = "on one node" if config.placement_strategy == "STRICT_PACK" else "on these nodes"
    hints = ["set wait_for_nodes: true where nodes will be added"]
    if config.placement_strategy == "STRICT_PACK" and config.tensor_parallel_size > 1:
        hints.append("placement_strategy: PACK lets an engine span nodes")
    if NEURON_CORES in lack:
        hints.append(_DECLARE)
    raise ConfigError(
        f"{config.served_model_name}: the engine needs {describe(*wanted)} {place}; {lack}; "
        + "; ".join(hints)
    )


def wait_for(group: PlacementGroup, config: EngineConfig) -> None:
    """Returns once every bundle is on a node, and logs why that takes long.

    Raises `TimeoutError` after `load_timeout_s`.
    """
    begun = time.monotonic()
    log = WaitLog(config.served_model_name)
    while not group.wait(1):
        reason = _why_waiting(placement_group_table(group), config)
        log.add(reason)
        if time.monotonic() > begun + config.load_timeout_s:
            raise TimeoutError(
                f"no room after load_timeout_s, {config.load_timeout_s:g} s: {reason}"
            )
    log.end()


class WaitReport:
    """Logs why an engine is not placed yet, from a process that runs already."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._log: WaitLog | None = None

    def __call__(self) -> None:
        """Look once; to be called every few seconds."""
        waiting = [t for t in placement_group_table().values() if self._is_ours(t)]
        if not waiting:
            if self._log is not None:
                self._log.end()
            self._log = None
            return
        if self._log is None:
            self._log = WaitLog(self._config.served_model_name)
        self._log.add(_why_waiting(waiting[0], self._config))

    def _is_ours(self, table: Mapping[str, Any]) -> bool:
        ours = [table["bundles"].get(i) for i in range(len(table["bundles"]))]
        return table["state"] == "PENDING" and ours == bundles(self._config)


class WaitLog:
    """What is logged of one wait: its reason, at intervals that double."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._next_s = _FIRST_WORD_S
        self._told = False

    def add(self, reason: str) -> None:
        """The reason now."""
        waited = time.monotonic() - self._begun
        if waited < self._next_s:
            return
        self._next_s = waited + min(max(waited, _FIRST_WORD_S), _LONGEST_SILENCE_S)
        self._told = True
        logger.warning("%s has waited %.0f s for room: %s", self._name, waited, reason)

    def end(self) -> None:
        """The wait is over."""
        if self._told:
            waited = time.monotonic() - self._begun
            logger.warning("%s has found room after %.0f s", self._name, waited)


def _why_waiting(table: Mapping[str, Any], config: EngineConfig) -> str:
    """What is missing for the bundles of a placement group that have no node."""
    nodes = _nodes("Resources")
    wanted: Sequence[Resources] = bundles(config)
    missing = [
        bundle
        for index, bundle in enumerate(wanted)
        if table["bundles_to_node_id"].get(index) not in nodes
    ]
    if lack := shortage(missing, config.placement_strategy, nodes):
        return f"no node for {describe(*missing)} is here, {lack}"
    if lack := shortage(missing, config.placement_strategy, _nodes("Available")):
        return f"others use what {describe(*missing)} needs; free now: {lack}"
    return "there is room, and Ray is about to use it"


def _nodes(kind: str) -> dict[str, Resources]:
    """By node id of those alive, the `Resources` they have in all, or what is `Available`."""
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if kind == "Resources":
        return alive
    free = ray._private.state.available_resources_per_node()
    return {node: free.get(node, {}) for node in alive}
