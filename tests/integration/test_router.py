"""The router on a real Ray cluster: streams, aborts, object store, two ranks, a killed shard."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray import serve
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.serve.handle import DeploymentHandle

from actors.bundles import ROUTER_CPUS, bundles
from actors.config import EngineConfig
from actors.llm import LLM
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from actors.router import Router
from app.ingress import engine_of
from app.resume import resuming

PROMPTS = [list(range(20, 31)), [7], list(range(100, 170)), [250, 41] * 9, [3, 1, 4, 1, 5]]
MAX_TOKENS = 30
LONG = 600
WAIT_S = 120.0
SMALL: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "threads_per_shard": 1,
    "backend": "eager",
}
Pair = tuple[Path, Path]


def args_of(pair: Pair, **changes: Any) -> dict[str, Any]:
    speculative = {"method": "dflash", "model": str(pair[1])}
    return {"model": str(pair[0]), "speculative_config": speculative, **SMALL, **changes}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this module's own, with Serve."""
    # Short: Ray puts Unix sockets below it, whose paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="dft", ignore_cleanup_errors=True) as temp_dir:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            _temp_dir=temp_dir,
        )
        try:
            serve.start(http_options={"location": "NoServer"})
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def routing(name: str, args: dict[str, Any]) -> Iterator[DeploymentHandle]:
    """A router as `app.main` deploys it, but for faster health checks."""
    config = EngineConfig.resolve(args)
    app = (
        serve.deployment(Router)
        .options(
            ray_actor_options={"num_cpus": ROUTER_CPUS},
            placement_group_bundles=bundles(config),
            max_ongoing_requests=100,
            health_check_period_s=1,
        )
        .bind(config)
    )
    try:
        yield serve.run(app, name=name, route_prefix=None)
    finally:
        serve.delete(name)


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


def request_for(prompt: Sequence[int], name: str, max_tokens: int = MAX_TOKENS) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def chunks_of(
    handle: DeploymentHandle, request: GenerateRequest, begun: asyncio.Event | None = None
) -> list[TokenChunk]:
    """All of a stream; sets `begun` with its first chunk."""
    chunks = []
    async for chunk in engine_of(handle)(request):
        chunks.append(chunk)
        if begun is not None:
            begun.set()
    return chunks


def generate(handle: DeploymentHandle, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Every prompt's tokens, all in flight together; checks what holds for every stream."""

    async def all_of_them() -> list[list[TokenChunk]]:
        requests = [request_for(prompt, f"request-{i}") for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(chunks_of(handle, request) for request in requests))

    return [tokens_of(chunks) for chunks in asyncio.run(all_of_them())]


def tokens_of(chunks: Sequence[TokenChunk]) -> tuple[int, ...]:
    """Of a whole stream, each of them exactly once."""
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.first_index == len(tokens)
        tokens += chunk.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    return tuple(tokens)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s in vain until {what}"
        time.sleep(0.2)


def all_pages_free(handle: DeploymentHandle) -> bool:
    free, usable = handle.free_pages.remote().result()
    return bool(free == usable)


def shard_pids() -> list[int]:
    return pids_of("_RayShard")


def pids_of(title: str) -> list[int]:
    """Of this module's cluster: its processes descend from this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and title in process.cmdline()[0]:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


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


def is_healthy(handle: DeploymentHandle) -> bool:
    try:
        handle.check.remote().result(timeout_s=10)
    except Exception:
        return False
    return True
