"""However often ranks are lost and replaced, nothing of those before stays behind."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from actors.llm import LLM
from actors.messages import SamplingParams, TokenChunk
from tests.integration.routing import (
    WAIT_S,
    Pair,
    all_pages_free,
    args_of,
    engine_of,
    pids_of,
    request_for,
    routing,
    tokens_of,
    wait_until,
)

# What may differ by chance: Ray's own threads and connections come and go.
SLACK = 12


class Held:
    """What the cluster holds, and the router's process."""

    def __init__(self, router_pid: int) -> None:
        process = psutil.Process(router_pid)
        self.files = process.num_fds()
        self.threads = process.num_threads()
        self.shared = sum(path.stat().st_size for path in Path("/dev/shm").glob("*"))
        self.groups = Counter(table["state"] for table in placement_group_table().values())
        actors: Any = ray._private.state.actors().values()
        self.actors = Counter(a["ActorClassName"] for a in actors if a["State"] == "ALIVE")


@pytest.mark.parametrize(
    ("killed", "times"),
    # So many drafters in a row are replaced, none of which lasted.
    [("_RayShard", 20), ("_RayDrafterShard", 4)],
)
def test_nothing_stays_behind(cluster: None, tiny_pair: Pair, killed: str, times: int) -> None:
    args = args_of(tiny_pair, cpus_per_shard=0.3)
    args["speculative_config"] |= {"placement": "dedicated"}
    request = request_for([5, 1], killed, 2000)
    with LLM(**args_of(tiny_pair, speculative_config=None)) as llm:
        sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
        (undisturbed,) = llm.generate([list(request.prompt_token_ids)], sampling)
    with routing("often", args) as router:
        (router_pid,) = pids_of("ServeReplica:often")

        first = before = Held(router_pid)

        async def stream_with_deaths() -> list[TokenChunk]:
            chunks: list[TokenChunk] = []
            nonlocal before
            dead, heard = set[int](), 0
            async with asyncio.timeout(4 * WAIT_S):
                async for chunk in engine_of(router)(request):
                    chunks.append(chunk)
                    heard += len(chunk.token_ids)
                    # Progress, or the request would count as what kills.
                    (alive,) = set(pids_of(killed)) - dead or (0,)
                    if alive and heard >= 20 and len(dead) < times:
                        if len(dead) == 1:  # what is made once has been made
                            before = Held(router_pid)
                        os.kill(alive, signal.SIGKILL)
                        dead.add(alive)
                        heard = 0
            assert len(dead) == times
            return chunks

        assert tokens_of(asyncio.run(stream_with_deaths())) == undisturbed.token_ids
        wait_until(lambda: len(pids_of(killed)) == 1, "the last one is replaced")
        wait_until(lambda: all_pages_free(router), "all pages are free")
        wait_until(lambda: Held(router_pid).actors == first.actors, "no actor is left")
        after = Held(router_pid)
        assert after.groups == first.groups
        assert after.files <= before.files + SLACK
        assert after.threads <= before.threads + SLACK
        assert after.shared <= before.shared + (1 << 20)
