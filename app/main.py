"""The only wiring: from a configuration to the Serve application `serve run` starts."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application

from actors.bundles import ROUTER_CPUS, bundles
from actors.cluster import WaitReport, refuse_impossible
from actors.config import resolve_served
from actors.router import Router, max_requests
from app.ingress import OpenAIServer

_SERVER_CPUS = 0.1
_HEALTH_CHECK_PERIOD_S = 2.0


def build(args: dict[str, Any]) -> Application:
    """One engine behind an OpenAI-compatible server; `args` are those of `resolve_served`.

    Raises `ConfigError`, one line, before anything is placed: also where the nodes of the cluster
    it is called on could never hold the engine.
    """
    config, remote_grpc = resolve_served(args)
    if ray.is_initialized():
        refuse_impossible(config)
    router = (
        serve.deployment(Router)
        .options(
            ray_actor_options={"num_cpus": ROUTER_CPUS},
            placement_group_bundles=bundles(config),
            placement_group_strategy=config.placement_strategy,
            # Far above what the router takes: it refuses the rest itself, and answers health
            # checks meanwhile.
            max_ongoing_requests=2 * max_requests(config),
            # A lost engine is replaced after three misses.
            health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        )
        .bind(config)
    )
    return (
        serve.deployment(OpenAIServer)
        .options(
            ray_actor_options={"num_cpus": _SERVER_CPUS},
            max_ongoing_requests=2 * max_requests(config),
        )
        .bind(router, config, WaitReport(config), remote_grpc=remote_grpc)
    )
