"""The only wiring: from a configuration to the Serve application `serve run` starts."""

from typing import Any

from ray import serve
from ray.serve import Application

from actors.config import resolve_served
from actors.placement import ROUTER_CPUS, bundles
from actors.router import Router
from app.ingress import OpenAIServer

_SERVER_CPUS = 0.1
_SERVER_MAX_ONGOING = 1024
_ENGINE_MAX_ONGOING = 256
_ENGINE_MAX_QUEUED = 256
_HEALTH_CHECK_PERIOD_S = 2.0


def build(args: dict[str, Any]) -> Application:
    """One engine behind an OpenAI-compatible server; `args` are those of `resolve_served`.

    Raises `ConfigError`, one line, before anything is placed.
    """
    config, remote_grpc = resolve_served(args)
    router = (
        serve.deployment(Router)
        .options(
            ray_actor_options={"num_cpus": ROUTER_CPUS},
            placement_group_bundles=bundles(config),
            # All ranks on one node: they meet on loopback.
            placement_group_strategy="STRICT_PACK",
            # The engine has a queue of its own. Both bounds together stay below the server's, so
            # that it can refuse what is beyond them, and answer /health meanwhile.
            max_ongoing_requests=_ENGINE_MAX_ONGOING,
            max_queued_requests=_ENGINE_MAX_QUEUED,
            # A lost engine is replaced after three misses.
            health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        )
        .bind(config)
    )
    return (
        serve.deployment(OpenAIServer)
        .options(
            ray_actor_options={"num_cpus": _SERVER_CPUS},
            max_ongoing_requests=_SERVER_MAX_ONGOING,
        )
        .bind(router, config, remote_grpc=remote_grpc)
    )
