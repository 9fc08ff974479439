"""Engines on several nodes with declared NeuronCores: where ranks are, and what if none fits."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import ray
from ray import serve
from ray.util.placement_group import placement_group, remove_placement_group

from actors import cluster as cluster_module
from actors.bundles import bundles
from actors.cluster import WaitReport
from actors.config import EngineConfig
from actors.errors import ConfigError
from actors.placement import RayShardGroup
from app.main import build
from benchmarks.server import free_port
from tests.integration.demo import CONTINUATION, USER_MESSAGE, demo_args
from tests.integration.nodes import (
    PROMPT,
    Nodes,
    Pair,
    cluster,
    expected_tokens,
    groups_left,
    placed,
    seats,
    shards_left,
    tiny_args,
    tokens_from,
)
from tests.tiny import make_pair

MAX_TOKENS = 30
WAIT_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Random, target and drafter."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes with a NeuronCore each, beside one without."""
    with cluster() as nodes:
        nodes.add(2, neuron_cores=1)
        nodes.add(2, neuron_cores=1)
        yield nodes


@pytest.fixture(autouse=True)
def nothing_left(nodes: Nodes) -> Iterator[None]:
    yield
    wait_until(lambda: not groups_left() and not shards_left(), "groups and shards are gone")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged of waiting, soon and often."""
    monkeypatch.setattr(cluster_module, "_FIRST_WORD_S", 0.5)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    cluster_module.logger.addHandler(handler)
    yield lines
    cluster_module.logger.removeHandler(handler)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s in vain until {what}"
        time.sleep(0.2)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_ranks_on_two_nodes_make_the_same_tokens(nodes: Nodes, pair: Pair, strategy: str) -> None:
    args = tiny_args(pair, tensor_parallel_size=2, placement_strategy=strategy)
    config = EngineConfig.resolve(args)
    with placed(config) as shards:
        assert sorted(seats(shards)) == [("127.0.0.12", "0"), ("127.0.0.13", "0")]
        found = tokens_from(config, shards, PROMPT, MAX_TOKENS)
    assert found == expected_tokens(args, PROMPT, MAX_TOKENS)


def test_engines_on_one_node_share_no_core(nodes: Nodes, pair: Pair) -> None:
    args = tiny_args(pair, tensor_parallel_size=2)
    config = EngineConfig.resolve(args)
    large = nodes.add(5, neuron_cores=4)
    try:
        with placed(config) as one, placed(config) as other:
            places = [*seats(one), *seats(other)]
            assert {address for address, _ in places} == {large.node_ip_address}
            assert sorted(str(cores) for _, cores in places) == ["0", "1", "2", "3"]
            expected = expected_tokens(args, PROMPT, MAX_TOKENS)
            assert tokens_from(config, one, PROMPT, MAX_TOKENS) == expected
            assert tokens_from(config, other, PROMPT, MAX_TOKENS) == expected
    finally:
        nodes.cluster.remove_node(large)


def test_an_engine_that_no_node_can_hold_is_refused(nodes: Nodes, pair: Pair) -> None:
    args = tiny_args(pair, tensor_parallel_size=2)
    with pytest.raises(ConfigError) as refused:
        build(args)
    (line,) = str(refused.value).splitlines()
    for part in (
        "tiny",
        "2 x (CPU 1, neuron_cores 1) and (CPU 0.1) on one node",
        "neuron_cores: 2 needed, the largest node has 1",
        "placement_strategy: PACK",
        "ray start --resources='{\"neuron_cores\": 64}'",
        "wait_for_nodes",
    ):
        assert part in line
    with pytest.raises(ConfigError, match="neuron_cores: 3 needed, all nodes together have 2"):
        build(args | {"tensor_parallel_size": 3, "placement_strategy": "SPREAD"})
    build(args | {"placement_strategy": "PACK"})
    build(args | {"wait_for_nodes": True})


def test_an_engine_waits_for_cores_and_says_so(nodes: Nodes, pair: Pair, told: list[str]) -> None:
    args = tiny_args(pair, tensor_parallel_size=2, placement_strategy="PACK")
    config = EngineConfig.resolve(args)
    holder = placement_group([{"neuron_cores": 1}])
    assert holder.wait(WAIT_S)
    group = placement_group(bundles(config), strategy="PACK")
    report = WaitReport(config)
    made: list[RayShardGroup] = []
    thread = threading.Thread(target=lambda: made.append(RayShardGroup(config, group)))
    try:
        thread.start()
        reason = "neuron_cores: 2 needed, all nodes together have 1"
        wait_until(lambda: any(reason in line for line in told), "the wait is told of")
        assert all("tiny has waited" in line for line in told)
        told.clear()

        def is_reported() -> bool:
            report()
            return any(reason in line for line in told)

        wait_until(is_reported, "the wait is reported by others")
        assert not made
        remove_placement_group(holder)
        thread.join(WAIT_S)
        report()
        assert sum("found room" in line for line in told) == 2
        told.clear()
        report()
        assert not told
        assert len(made[0].actors) == 2
    finally:
        remove_placement_group(holder)
        for shards in made:
            shards.close()
        remove_placement_group(group)


def test_two_nodes_serve_the_demo(nodes: Nodes) -> None:
    buckets = {
        "decode_sequences": [1],
        "verify_widths": [10],
        "prefill_widths": [16],
        "context_lengths": [128],
    }
    args = demo_args(
        backend="eager",
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_kv_pages=9,
        buckets=buckets,
    )
    over_two = {
        "tensor_parallel_size": 2,
        "placement_strategy": "PACK",
        "neuron_cores_per_shard": 1,
        "threads_per_shard": 1,
    }
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build(args | over_two), name="demo", route_prefix="/")
        body = {
            "model": args["model"],
            "messages": [{"role": "user", "content": USER_MESSAGE}],
            "max_tokens": 12,
            "temperature": 0,
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        addresses = {
            actor["Address"]["NodeID"]
            for actor in ray._private.state.actors().values()
            if actor["ActorClassName"] == "_RayShard" and actor["State"] == "ALIVE"
        }
        assert len(addresses) == 2
    finally:
        serve.shutdown()
    assert CONTINUATION.startswith(text)
    assert len(text) > 30
