"""The actors of one kind of rank: how they meet, load and end."""

import logging
from collections.abc import Sequence
from typing import Any

import ray

logger = logging.getLogger(__name__)


def hosts_of(actors: Sequence[Any], timeout_s: float) -> list[str]:
    """Where they reach each other: on loopback where all are on one node."""
    hosts: list[str] = ray.get([rank.node_address.remote() for rank in actors], timeout=timeout_s)
    return ["127.0.0.1"] * len(hosts) if len(set(hosts)) == 1 else hosts


def load(actors: Sequence[Any], timeout_s: float) -> None:
    """Let all of them join their group and read their weights. Raises what one of them raised."""
    if len(actors) == 1:
        ray.get(actors[0].load.remote(), timeout=timeout_s)
        return
    hosts = hosts_of(actors, timeout_s)
    rendezvous = ray.get(actors[0].rendezvous.remote(hosts[0]), timeout=timeout_s)
    loads = [rank.load.remote(rendezvous, host) for rank, host in zip(actors, hosts, strict=True)]
    ray.get(loads, timeout=timeout_s)


def kill(actors: Sequence[Any]) -> None:
    """End their processes: one that waits in a collective for a dead peer would never end."""
    for actor in actors:
        try:
            ray.kill(actor)
        except ray.exceptions.RayError as error:  # the others must go all the same
            logger.warning("a shard could not be killed: %s", error)
