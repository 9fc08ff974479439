"""The router on a real Ray cluster: streams, aborts, object store, two ranks, a killed shard."""

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.serve.handle import DeploymentHandle

from actors.llm import LLM
from actors.messages import SamplingParams, TokenChunk
from app.ingress import engine_of
from app.resume import resuming
from tests.integration.routing import (
    LONG,
    MAX_TOKENS,
    PROMPTS,
    WAIT_S,
    Pair,
    all_pages_free,
    args_of,
    chunks_of,
    generate,
    is_healthy,
    pids_of,
    request_for,
    routing,
    shard_pids,
    tokens_of,
    wait_until,
)


@pytest.fixture(scope="module")
def router(cluster: None, tiny_pair: Pair) -> Iterator[DeploymentHandle]:
    with routing("one", args_of(tiny_pair)) as handle:
        yield handle


@pytest.fixture(scope="module")
def expected(tiny_pair: Pair) -> list[tuple[int, ...]]:
    """What `LLM` makes of `PROMPTS` without speculation."""
    with LLM(**args_of(tiny_pair, speculative_config=None)) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    return [output.token_ids for output in outputs]


def test_streams_equal_the_engine_in_one_process(
    router: DeploymentHandle, expected: list[tuple[int, ...]]
) -> None:
    assert generate(router, PROMPTS) == expected
    assert [generate(router, [prompt])[0] for prompt in PROMPTS[:2]] == expected[:2]
    wait_until(lambda: all_pages_free(router), "all pages are free")


def test_a_closed_stream_frees_its_pages(router: DeploymentHandle) -> None:
    async def leave_after_some_chunks() -> int:
        stream = engine_of(router)(request_for(PROMPTS[0], "left", max_tokens=2000))
        num_chunks = 0
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 3:
                break
        free, usable = await router.free_pages.remote()
        await stream.aclose()
        return int(usable - free)

    assert asyncio.run(leave_after_some_chunks()) > 0, "the request held no pages"
    wait_until(lambda: all_pages_free(router), "all pages are free")


def test_steps_leave_nothing_in_the_object_store(router: DeploymentHandle) -> None:
    before = StoreStats()
    chunks = asyncio.run(chunks_of(router, request_for(PROMPTS[1], "long", max_tokens=1900)))
    after = StoreStats()
    steps = chunks[-1].speculation.verify_steps
    assert steps >= 1000
    assert after.bytes_used - before.bytes_used < 1024 * steps
    assert after.bytes_created - before.bytes_created < 1024 * steps

    kept = ray.put(np.zeros(2 << 20, dtype=np.uint8))
    control = StoreStats()
    assert control.bytes_used - after.bytes_used >= 2 << 20, "the measure sees no growth"
    assert control.bytes_created - after.bytes_created >= 2 << 20
    del kept


class StoreStats:
    """Bytes in the cluster's object store now, and ever created in it."""

    def __init__(self) -> None:
        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        stats = get_memory_info_reply(state).store_stats
        self.bytes_used: int = stats.object_store_bytes_used
        self.bytes_created: int = stats.cumulative_created_bytes


def test_two_ranks_and_the_death_of_one(
    cluster: None, tiny_pair: Pair, expected: list[tuple[int, ...]]
) -> None:
    prompts = [[5, i] for i in range(3)]
    with LLM(**args_of(tiny_pair, speculative_config=None)) as llm:
        sampling = SamplingParams(max_tokens=LONG, ignore_eos=True)
        undisturbed = [output.token_ids for output in llm.generate(prompts, sampling)]
    others = set(shard_pids())

    def ranks_now() -> set[int]:
        return set(shard_pids()) - others

    with routing("two", args_of(tiny_pair, tensor_parallel_size=2)) as router:
        assert generate(router, PROMPTS) == expected
        first = ranks_now()
        assert len(first) == 2

        async def streams_with_a_death() -> list[list[TokenChunk]]:
            requests = [request_for(prompt, f"{prompt}", LONG) for prompt in prompts]
            begun = [asyncio.Event() for _ in requests]
            tasks = [
                asyncio.create_task(chunks_of(router, request, event))
                for request, event in zip(requests, begun, strict=True)
            ]
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(event.wait() for event in begun))
                os.kill(max(first), signal.SIGKILL)
                assert not any(task.done() for task in tasks)
                return await asyncio.gather(*tasks)

        chunks = asyncio.run(streams_with_a_death())
        assert [tokens_of(each) for each in chunks] == undisturbed
        second = ranks_now()
        # The rank that was left alone in its collective is gone as well.
        assert len(second) == 2
        assert not first & second

        # A death that no step finds.
        os.kill(max(second), signal.SIGKILL)
        wait_until(lambda: not second & ranks_now(), "both ranks have ended")
        wait_until(lambda: is_healthy(router), "there are others")
        assert len(ranks_now()) == 2
        assert generate(router, PROMPTS) == expected
        wait_until(lambda: all_pages_free(router), "all pages are free")
    wait_until(lambda: not ranks_now(), "the deleted application's ranks have ended")


def test_a_rank_that_hangs_is_found_by_its_deadline(cluster: None, tiny_pair: Pair) -> None:
    """One that is alive and does not answer."""
    request = request_for([5, 1], "hangs", LONG)
    args = args_of(tiny_pair, step_timeout_s=3.0)
    with LLM(**args | {"speculative_config": None}) as llm:
        (undisturbed,) = llm.generate([list(request.prompt_token_ids)], request.sampling)
    others = set(shard_pids())
    with routing("hanging", args) as router:
        (first,) = set(shard_pids()) - others

        async def stream_with_a_stop() -> list[TokenChunk]:
            chunks = []
            async with asyncio.timeout(WAIT_S):
                async for chunk in engine_of(router)(request):
                    if not chunks:
                        os.kill(first, signal.SIGSTOP)
                    chunks.append(chunk)
            return chunks

        assert tokens_of(asyncio.run(stream_with_a_stop())) == undisturbed.token_ids
        (second,) = set(shard_pids()) - others
        assert second != first


def test_a_stream_outlives_its_router(cluster: None, tiny_pair: Pair) -> None:
    request = request_for([5, 1], "outlives", LONG)
    with LLM(**args_of(tiny_pair, speculative_config=None)) as llm:
        (undisturbed,) = llm.generate([list(request.prompt_token_ids)], request.sampling)
    with routing("mortal", args_of(tiny_pair)) as router:
        (first,) = pids_of("ServeReplica:mortal")

        async def stream_with_a_death() -> list[TokenChunk]:
            chunks = []
            async with asyncio.timeout(WAIT_S):
                async for chunk in resuming(engine_of(router))(request):
                    if not chunks:
                        os.kill(first, signal.SIGKILL)
                    chunks.append(chunk)
            return chunks

        assert tokens_of(asyncio.run(stream_with_a_death())) == undisturbed.token_ids
        (second,) = pids_of("ServeReplica:mortal")
        assert second != first
        wait_until(lambda: all_pages_free(router), "all pages are free")
