"""A request whose engine is lost goes on with another, behind the tokens that came."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.errors import EngineDead, EngineOverloaded, RequestRejected
from actors.messages import GenerateRequest, SpeculationStats, TokenChunk
from app import resume
from app.resume import resuming
from tests.unit.actors.builders import generate_request

TOKENS = tuple(range(10, 30))
STATS = SpeculationStats(verify_steps=4, draft_tokens=9, emitted_tokens=8)


class Engines:
    """Engines of which the i-th serves `runs[i]`: chunks of so many tokens, then what it raises.

    Behind the last run, one serves to the end.
    """

    def __init__(self, *runs: tuple[Sequence[int], Exception]) -> None:
        self.runs = list(runs)
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        sizes, error = self.runs.pop(0) if self.runs else ([len(TOKENS)], None)
        first = len(request.emitted_token_ids)
        try:
            for size in sizes:
                tokens = TOKENS[first : first + size]
                yield TokenChunk(
                    request_id=request.request_id,
                    first_index=first,
                    token_ids=tokens,
                    finish_reason="length" if first + size >= len(TOKENS) else None,
                    speculation=STATS,
                )
                first += size
            if error is not None:
                raise error
        finally:
            self.num_closed += 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_RETRY_AFTER_S", 0.001)
    monkeypatch.setattr(resume, "_GIVE_UP_AFTER_S", 0.05)


def tokens_of(engines: Any) -> tuple[int, ...]:
    async def read() -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        async for chunk in resuming(engines)(generate_request(max_tokens=len(TOKENS))):
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
        return tokens

    return asyncio.run(read())


def died() -> RayActorError:
    return RayActorError()


LOSSES = [
    EngineDead("gone"),
    died(),
    RayTaskError("f", "traceback", EngineDead("gone")).as_instanceof_cause(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["dead", "actor", "remote"])
def test_an_engine_that_is_lost_is_followed_by_another(loss: Exception) -> None:
    engines = Engines(([], loss), ([1, 3], loss), ([2], loss), ([], loss))
    assert tokens_of(engines) == TOKENS
    emitted = [request.emitted_token_ids for request in engines.requests]
    assert emitted == [(), (), TOKENS[:4], TOKENS[:6], TOKENS[:6]]
    assert engines.requests[-1].emitted_speculation == STATS
    assert engines.num_closed == len(engines.requests)


def test_what_comes_twice_is_known() -> None:
    """An engine may begin a chunk before where it was to go on."""
    engines = Engines(([4], EngineDead("gone")))

    async def repeating(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in engines(request):
            yield chunk
            yield chunk

    async def read() -> None:
        async for _ in resuming(repeating)(generate_request(max_tokens=len(TOKENS))):
            pass

    asyncio.run(read())
    assert engines.requests[-1].emitted_token_ids == TOKENS[:4]


def test_a_loss_behind_the_last_token_is_none() -> None:
    engines = Engines(([len(TOKENS)], EngineDead("gone")))
    assert tokens_of(engines) == TOKENS
    assert len(engines.requests) == 1


@pytest.mark.parametrize("error", [RequestRejected("no", "prompt"), ValueError("ours")])
def test_other_errors_are_the_clients_to_see(error: Exception) -> None:
    engines = Engines(([2], error))
    with pytest.raises(type(error)):
        tokens_of(engines)
    assert len(engines.requests) == 1


def test_a_request_that_went_on_waits_where_it_is_crowded_and_a_new_one_does_not() -> None:
    crowded = EngineOverloaded("512 requests")
    with pytest.raises(EngineOverloaded):
        tokens_of(Engines(([], crowded)))
    assert tokens_of(Engines(([3], EngineDead("gone")), ([], crowded), ([], crowded))) == TOKENS


def test_it_gives_up_after_a_while() -> None:
    with pytest.raises(EngineDead):
        tokens_of(Engines(*[([], EngineDead("gone"))] * 1000))


def test_a_request_in_many_deaths_may_be_their_cause() -> None:
    engines = Engines(([3], died()), *[([], died())] * 10)
    with pytest.raises(RayActorError):
        tokens_of(engines)
    assert len(engines.requests) == 1 + 2
    # Not if it got tokens between them.
    assert tokens_of(Engines(*[([2], died())] * 8)) == TOKENS


@pytest.mark.parametrize("loss", LOSSES, ids=["dead", "actor", "remote"])
def test_nor_does_a_token_each_time_let_it_go_on_for_ever(loss: Exception) -> None:
    engines = Engines(*[([1], loss)] * 100)
    with pytest.raises(type(loss)):
        tokens_of(engines)
    assert len(engines.requests) == 16


def test_each_engine_knows_it_by_another_id() -> None:
    engines = Engines(*[([1], EngineDead("gone"))] * 3)
    tokens_of(engines)
    ids = [request.request_id for request in engines.requests]
    assert ids == ["a", "a-2", "a-3", "a-4"]


def test_a_call_that_is_queued_for_ever_after_a_loss_is_given_up() -> None:
    engines = Engines(([2], EngineDead("gone")))

    async def queueing(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.emitted_token_ids:
            await asyncio.sleep(60)
        async for chunk in engines(request):
            yield chunk

    with pytest.raises(EngineDead, match="gone"):
        tokens_of(queueing)


def test_a_call_that_serve_cancels_goes_on_and_one_that_the_client_cancels_does_not() -> None:
    engines = Engines()

    async def cancelled_once(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if not engines.requests:
            engines.requests.append(request)
            raise asyncio.CancelledError
        async for chunk in engines(request):
            yield chunk

    assert tokens_of(cancelled_once) == TOKENS

    async def endless(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        engines.requests.append(request)
        await asyncio.sleep(60)
        yield TokenChunk(request_id="a", first_index=0, token_ids=(1,))

    async def cancel() -> None:
        task = asyncio.create_task(anext(resuming(endless)(generate_request())))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engines.requests.clear()
    asyncio.run(cancel())
    assert len(engines.requests) == 1


def test_closing_the_stream_closes_the_engines() -> None:
    engines = Engines()

    async def leave() -> None:
        async with aclosing(resuming(engines)(generate_request(max_tokens=len(TOKENS)))) as chunks:
            await anext(chunks)
            assert engines.num_closed == 0
        assert engines.num_closed == 1

    asyncio.run(leave())
