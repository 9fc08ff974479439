"""A router on a real Ray cluster, without HTTP in front, and its streams."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.bundles import ROUTER_CPUS, bundles
from actors.config import EngineConfig
from actors.messages import GenerateRequest, SamplingParams, TokenChunk
from actors.router import Router
from app.ingress import engine_of

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


def is_healthy(handle: DeploymentHandle) -> bool:
    try:
        handle.check.remote().result(timeout_s=10)
    except Exception:
        return False
    return True
