"""Streams outlive a node: one of an engine's shards, one of a whole engine."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.bundles import ROUTER_CPUS, bundles
from actors.config import EngineConfig
from actors.messages import GenerateRequest, SamplingParams
from actors.router import Router
from app.ingress import engine_of
from app.resume import resuming
from tests.integration.nodes import PROMPT, Nodes, Pair, cluster, expected_tokens, tiny_args
from tests.tiny import make_pair

MAX_TOKENS = 1000
WAIT_S = 150.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Random, target and drafter."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", max_position_embeddings=4096)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Nothing but Serve has room on the first node."""
    with cluster() as nodes:
        serve.start(http_options={"location": "NoServer"})
        yield nodes


@contextmanager
def routing(args: dict[str, Any]) -> Iterator[DeploymentHandle]:
    """A router as `app.main` deploys it, but for faster health checks."""
    config = EngineConfig.resolve(args)
    app = (
        serve.deployment(Router)
        .options(
            ray_actor_options={"num_cpus": ROUTER_CPUS},
            placement_group_bundles=bundles(config),
            placement_group_strategy=config.placement_strategy,
            health_check_period_s=1,
        )
        .bind(config)
    )
    try:
        yield serve.run(app, name="mortal", route_prefix=None)
    finally:
        serve.delete("mortal")


def nodes_of(class_name: str) -> set[str]:
    """Addresses of the nodes with living actors of this class."""
    return {
        actor["Address"]["IPAddress"]
        for actor in ray._private.state.actors().values()
        if class_name in actor["ActorClassName"] and actor["State"] == "ALIVE"
    }


async def stream_over_a_death(
    router: DeploymentHandle, nodes: Nodes, victim: Any
) -> tuple[tuple[int, ...], float]:
    """All tokens of a stream under which the node `victim` dies, and its longest pause, seconds."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    request = GenerateRequest(
        request_id="outlives", prompt_token_ids=tuple(PROMPT), sampling=sampling
    )
    tokens: list[int] = []
    pause_s, heard_at, killed = 0.0, time.monotonic(), False
    async with asyncio.timeout(WAIT_S):
        async for chunk in resuming(engine_of(router))(request):
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
            pause_s, heard_at = max(pause_s, time.monotonic() - heard_at), time.monotonic()
            if not killed:
                killed = True
                await asyncio.to_thread(nodes.kill, victim)
    return tuple(tokens), pause_s


@pytest.mark.parametrize("of", ["a shard", "router and shard"])
def test_a_stream_outlives_a_node(nodes: Nodes, pair: Pair, of: str) -> None:
    if of == "a shard":
        # A shard fills its node: the router is on the first.
        args = tiny_args(pair, tensor_parallel_size=2, placement_strategy="PACK")
        workers = [nodes.add(1, neuron_cores=1) for _ in range(3)]
    else:
        args = tiny_args(pair)
        workers = [nodes.add(2, neuron_cores=1) for _ in range(2)]
    expected = expected_tokens(args, PROMPT, MAX_TOKENS)
    with routing(args) as router:
        before = nodes_of("_RayShard")
        if of == "a shard":
            assert nodes_of("Router") == {"127.0.0.11"}
            assert len(before) == 2
        else:
            assert nodes_of("Router") == before
        victim = next(node for node in workers if node.node_ip_address in before)
        tokens, pause_s = asyncio.run(stream_over_a_death(router, nodes, victim))
        print(f"{of}: a pause of {pause_s:.1f} s")
        assert tokens == expected
        # Serve may be sooner than the health checks.
        deadline = time.monotonic() + WAIT_S
        while victim.node_ip_address in (after := nodes_of("_RayShard")):
            assert time.monotonic() < deadline, "shards of a dead node count as alive"
            time.sleep(0.5)
        assert len(after) == len(before)
