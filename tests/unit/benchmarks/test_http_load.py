"""The HTTP client against our own application in this process, and against scripted servers."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import benchmarks.http_load
from actors.config import EngineConfig
from actors.messages import GenerateRequest, SpeculationStats, TokenChunk
from app.http_api import HttpApi
from app.service import Service
from app.tokenizer import Tokenizer
from benchmarks.http_load import HttpLoad
from benchmarks.load import LoadFailed

URL = "http://test"


def ignore() -> None:
    return None


class Engine:
    """Emits as many tokens as it may, in chunks of up to two; knows how many it served at once."""

    def __init__(self, expected_in_flight: int = 1) -> None:
        """No request gets a token until `expected_in_flight` have been there at once."""
        self.expected_in_flight = expected_in_flight
        self.all_there = asyncio.Event()
        self.requests: list[GenerateRequest] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.expected_in_flight:
            self.all_there.set()
        num_tokens = request.sampling.max_tokens
        try:
            await asyncio.wait_for(self.all_there.wait(), 30)
            for first in range(0, num_tokens, 2):
                await asyncio.sleep(0)
                yield TokenChunk(
                    request_id=request.request_id,
                    first_index=first,
                    token_ids=(40,) * min(2, num_tokens - first),
                    finish_reason="length" if first + 2 >= num_tokens else None,
                    speculation=SpeculationStats(
                        verify_steps=3, draft_tokens=12, accepted_tokens=2, emitted_tokens=5
                    ),
                )
        finally:
            self.in_flight -= 1


def serve(pair: tuple[Path, Path], engine: Engine, *, drafter: bool) -> httpx.ASGITransport:
    """Our application, with `engine` where the router would be."""
    speculative = {"method": "dflash", "model": str(pair[1])}
    config = EngineConfig.resolve(
        {
            "model": str(pair[0]),
            "served_model_name": "tiny",
            "speculative_config": speculative if drafter else None,
        }
    )
    service = Service(config, Tokenizer.load(config.target_path), engine)

    async def check() -> None:
        return None

    return httpx.ASGITransport(HttpApi(service, check).build())


def test_tokens_and_acceptance_come_from_usage(pair: tuple[Path, Path]) -> None:
    engine = Engine()
    load = HttpLoad("dflash", URL, serve(pair, engine, drafter=True))
    finished: list[None] = []
    samples = load.run(["a", "b", "c"], 5, 2, lambda: finished.append(None))
    assert len(finished) == 3
    assert [sample.num_tokens for sample in samples] == [5, 5, 5]
    assert {(sample.verify_steps, sample.emitted_tokens) for sample in samples} == {(3, 5)}
    assert all(s.submitted_at < s.first_token_at < s.finished_at for s in samples)
    assert len({request.prompt_token_ids for request in engine.requests}) == 3
    assert {request.sampling.max_tokens for request in engine.requests} == {5}


def test_usage_without_a_drafter_has_no_verify_steps(pair: tuple[Path, Path]) -> None:
    load = HttpLoad("off", URL, serve(pair, Engine(), drafter=False))
    (sample,) = load.run(["a"], 3, 1, ignore)
    assert (sample.num_tokens, sample.verify_steps, sample.emitted_tokens) == (3, 0, 0)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (9, 6)])
def test_so_many_requests_are_in_flight(
    pair: tuple[Path, Path], concurrency: int, most: int
) -> None:
    engine = Engine(expected_in_flight=most)
    load = HttpLoad("off", URL, serve(pair, engine, drafter=False))
    assert len(load.run(list("abcdef"), 8, concurrency, ignore)) == 6
    assert engine.most_in_flight == most


class Script(httpx.AsyncByteStream):
    """Server-sent events, each at its time on `clock`."""

    def __init__(self, clock: SimpleNamespace, events: Sequence[tuple[float, Any]]) -> None:
        self._clock = clock
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at, event in self._events:
            self._clock.now = at
            data = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {data}\n\n".encode()


def scripted(
    clock: SimpleNamespace, events: Sequence[tuple[float, Any]], status: int = 200
) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        body = json.loads(request.content)
        assert body["model"] == "tiny"
        assert body["stream_options"] == {"include_usage": True}
        return httpx.Response(status, stream=Script(clock, events))

    return httpx.MockTransport(answer)


def delta(finish_reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(benchmarks.http_load, "time", clock)
    return clock


def test_times_are_of_events_with_tokens(clock: SimpleNamespace) -> None:
    """Neither who speaks nor usage is a token; the finish comes with the last."""
    events = [
        (2.0, delta(role="assistant", content="")),
        (4.0, delta(content="a")),
        (5.0, delta(content="bcd")),
        (6.5, delta("stop")),
        (9.0, USAGE),
        (9.5, "[DONE]"),
    ]
    (sample,) = HttpLoad("off", URL, scripted(clock, events)).run(["a"], 6, 1, ignore)
    assert (sample.submitted_at, sample.first_token_at, sample.finished_at) == (1.0, 4.0, 6.5)
    assert sample.ttft_s == 3.0
    assert sample.tpot_s == 0.5
    assert (sample.num_tokens, sample.verify_steps) == (6, 0)


def test_an_answer_without_text_ends_with_its_first_token(clock: SimpleNamespace) -> None:
    events = [(2.0, delta(role="assistant", content="")), (3.0, delta("stop")), (4.0, USAGE)]
    (sample,) = HttpLoad("off", URL, scripted(clock, events)).run(["a"], 6, 1, ignore)
    assert (sample.first_token_at, sample.finished_at) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("status", "events", "message"),
    [
        (503, [(2.0, "busy")], "http://test: status 503: data: busy"),
        (200, [(2.0, {"error": {"message": "lost"}})], "http://test: the stream ended with .*lost"),
        (200, [(2.0, delta(content="a"))], "without a token or without usage"),
        (200, [(2.0, "hello")], "an event of the stream is not in OpenAI's shape"),
        (200, [(2.0, {"text": "a"})], "an event of the stream is not in OpenAI's shape"),
        (200, [(2.0, USAGE)], "without a token or without usage"),
    ],
)
def test_a_request_that_fails_fails_the_load(
    clock: SimpleNamespace, status: int, events: list[tuple[float, Any]], message: str
) -> None:
    load = HttpLoad("off", URL, scripted(clock, events, status))
    with pytest.raises(LoadFailed, match=message):
        load.run(["a", "b"], 6, 2, ignore)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda request: httpx.Response(404, text="no\nsuch"), "http://test: status 404: no such"),
        (lambda request: httpx.Response(200, json={"data": []}), "/v1/models is not in OpenAI's"),
        (lambda request: httpx.Response(200, text="hello"), "/v1/models is not in OpenAI's"),
    ],
)
def test_what_is_no_server_is_refused_at_once(
    answer: Callable[[httpx.Request], httpx.Response], message: str
) -> None:
    with pytest.raises(LoadFailed, match=message):
        HttpLoad("off", URL, httpx.MockTransport(answer))


def test_a_server_that_is_not_there_is_said() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(LoadFailed, match="http://test: ConnectError"):
        HttpLoad("off", URL, httpx.MockTransport(refuse))
