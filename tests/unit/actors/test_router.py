"""What the router decides by itself; tests/integration/test_router.py has it on a cluster."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors import router as module
from actors.engine import Engine
from actors.errors import EngineDead, EngineOverloaded
from actors.messages import TokenChunk
from actors.router import Router, max_requests
from tests.unit.actors.builders import engine_config, generate_request


class SilentShards:
    """Ranks that take every step and never answer, until they are closed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.closed = False
        self.actors: list[Any] = []

    def step(self, payload: bytes) -> bytes:
        while not self.closed:
            time.sleep(0.01)
        raise RuntimeError("closed")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setattr(module, "RayShardGroup", SilentShards)
    monkeypatch.setattr(module, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(module, "EngineMetrics", lambda _: SimpleNamespace(publish=print))
    monkeypatch.setattr(Engine, "warm_up", lambda *_: None)
    monkeypatch.setattr(module, "_LAST_STEP_S", 0.1)
    return Router(engine_config(max_num_seqs=2))


async def first_chunk(router: Router, name: str) -> TokenChunk:
    return await anext(aiter(router.generate(generate_request(name))))


def test_requests_beyond_the_limit_are_refused_and_health_is_not(router: Router) -> None:
    async def burst() -> list[Any]:
        limit = max_requests(engine_config(max_num_seqs=2))
        streams = [asyncio.create_task(first_chunk(router, f"r{i}")) for i in range(limit)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded, match=str(limit)):
            await first_chunk(router, "one more")
        await router.check()
        # A shutdown does not wait for the step that never ends, and ends every stream.
        router.__del__()
        return await asyncio.gather(*streams, return_exceptions=True)

    ended = asyncio.run(burst())
    assert all(isinstance(error, EngineDead) for error in ended)
    with pytest.raises(EngineDead):
        asyncio.run(first_chunk(router, "late"))
