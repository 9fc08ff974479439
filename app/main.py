"""The only wiring: from a configuration to the Serve application `serve run` starts."""

from typing import Any

from ray import serve
from ray.serve import Application

from actors.config import EngineConfig
from actors.placement import ROUTER_CPUS, bundles
from actors.router import Router
from app.ingress import OpenAIServer

_SERVER_CPUS = 0.1
_MAX_ONGOING = 1024
_HEALTH_CHECK_PERIOD_S = 2.0


def build(args: dict[str, Any]) -> Application:
    """One engine behind an OpenAI-compatible server; `args` are those of `EngineArgs`.

    Raises `ConfigError`, one line, before anything is placed.
    """
    config = EngineConfig.resolve(args)
    router = (
        serve.deployment(Router)
        .options(
            ray_actor_options={"num_cpus": ROUTER_CPUS},
            placement_group_bundles=bundles(config),
            # The engine queues by itself; health checks must never wait behind requests.
            max_ongoing_requests=_MAX_ONGOING,
            max_queued_requests=_MAX_ONGOING,
            # A lost engine is replaced after three misses.
            health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        )
        .bind(config)
    )
    return (
        serve.deployment(OpenAIServer)
        .options(
            ray_actor_options={"num_cpus": _SERVER_CPUS},
            max_ongoing_requests=_MAX_ONGOING,
        )
        .bind(router, config, remote_grpc=config.remote_grpc)
    )
