"""What the chaos benchmark makes of what clients see; tests/e2e/test_chaos.py kills for real."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from benchmarks.chaos import Broken, Failed, Kill, Record, Stream, answer_of, events_of

DONE = "data: [DONE]\n\n"


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


class Answer(httpx.AsyncByteStream):
    """Lines of an answer, then the end of the connection, or a loss of it."""

    def __init__(self, lines: Sequence[str], is_lost: bool) -> None:
        self.lines, self.is_lost = lines, is_lost

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line.encode()
        if self.is_lost:
            raise httpx.ReadError("reset")


def client_of(*answers: tuple[int, Sequence[str], bool]) -> httpx.AsyncClient:
    """A client whose requests get these statuses and answers in turn."""
    left = list(answers)

    def respond(_: httpx.Request) -> httpx.Response:
        status, lines, is_lost = left.pop(0)
        return httpx.Response(status, stream=Answer(lines, is_lost))

    return httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://server")


def read(client: httpx.AsyncClient) -> list[str]:
    async def collect() -> list[str]:
        return [text async for text in events_of(client, {})]

    return asyncio.run(collect())


def test_an_answer_is_its_texts() -> None:
    assert read(client_of((200, [event("a"), event("b"), DONE], False))) == ["a", "b"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((503, ['{"error": {"message": "gone"}}'], False), Failed),
        ((500, ["Internal Server Error"], False), Broken),
        ((200, [event("a"), 'data: {"error": {"message": "gone"}}\n\n'], False), Failed),
        ((200, [event("a")], False), Broken),
        ((200, [event("a")], True), Broken),
    ],
    ids=["status", "proxy", "error", "no end", "reset"],
)
def test_a_failure_is_told_from_a_broken_connection(answer: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        read(client_of(answer))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_to(now: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: now)

    set_to(0.0)
    return set_to


def test_a_broken_answer_is_asked_for_again_and_a_failed_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.chaos._RETRY_AFTER_S", 0.0)
    whole = (200, [event("a"), event("b"), DONE], False)
    record, stream = Record(), Stream({})
    client = client_of((200, [event("a")], True), whole, (500, ['{"error": {}}'], False))
    assert asyncio.run(answer_of(client, stream, record)) == "ab"
    assert asyncio.run(answer_of(client, stream, record)) is None
    assert (record.answers, record.broken, record.failed) == (1, 1, 1)


def test_a_pause_is_from_a_kill_to_the_next_sign_of_what_had_begun(
    clock: Callable[[float], None],
) -> None:
    record, begun, queued = Record(), Stream({}), Stream({})
    clock(1.0)
    record.hear(begun)
    record.kills.append(Kill("shard", 2.0))
    clock(7.5)
    record.hear(begun)
    clock(90.0)
    record.hear(queued)
    record.kills.append(Kill("router", 91.0))
    clock(93.0)
    record.hear(begun)
    clock(99.0)
    record.hear(begun)
    record.hear(queued)
    result = record.result(streams=2)
    assert result["worst_pause_s"] == {"shard": 5.5, "router": 8.0}
    assert result["kills"] == {"shard": 1, "router": 1}
