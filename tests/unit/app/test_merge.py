import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from app.merge import merge


class Source:
    """Gives `num_items` items, then raises `error` or ends; `forever` it waits instead."""

    def __init__(
        self, num_items: int, *, error: Exception | None = None, forever: bool = False
    ) -> None:
        self.num_items = num_items
        self.error = error
        self.forever = forever
        self.num_given = 0
        self.num_closed = 0

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in range(self.num_items):
                self.num_given += 1
                yield item
                await asyncio.sleep(0)
            if self.forever:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.num_closed += 1


def read(*sources: Source, at_most: int = 1000) -> list[tuple[int, int]]:
    """Up to `at_most` merged items; fails where a task is left behind."""

    async def run() -> list[tuple[int, int]]:
        stream = merge([source.stream() for source in sources])
        items: list[tuple[int, int]] = []
        try:
            async with asyncio.timeout(5):
                async for item in stream:
                    items.append(item)
                    if len(items) == at_most:
                        break
        finally:
            await stream.aclose()
            assert asyncio.all_tasks() == {asyncio.current_task()}
        return items

    return asyncio.run(run())


def test_every_item_of_every_stream_in_its_order() -> None:
    sources = [Source(5), Source(0), Source(3), Source(1)]
    items = read(*sources)
    for index, source in enumerate(sources):
        assert [item for i, item in items if i == index] == list(range(source.num_items))
    assert len(items) == 9
    assert [source.num_closed for source in sources] == [1] * 4


def test_streams_take_turns() -> None:
    assert {index for index, _ in read(Source(50), Source(50), at_most=10)} == {0, 1}


def test_a_failure_ends_and_closes_all() -> None:
    sources = [Source(2, error=ValueError("broken")), Source(1, forever=True), Source(10**6)]
    with pytest.raises(ValueError, match="broken"):
        read(*sources, at_most=10**9)
    assert [source.num_closed for source in sources] == [1] * 3


def test_closing_closes_all() -> None:
    sources = [Source(1, forever=True), Source(10**6), Source(0, forever=True)]
    assert len(read(*sources, at_most=5)) == 5
    assert [source.num_closed for source in sources] == [1] * 3


def test_a_cancelled_reader_closes_all() -> None:
    source = Source(1, forever=True)

    async def run() -> None:
        reader = asyncio.create_task(drain(merge([source.stream(), source.stream()])))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    async def drain(stream: AsyncGenerator[Any, None]) -> None:
        async for _ in stream:
            pass

    asyncio.run(run())
    assert source.num_closed == 2


def test_a_slow_reader_holds_the_streams_back() -> None:
    source = Source(1000)

    async def run() -> None:
        stream = merge([source.stream()])
        await anext(stream)
        await asyncio.sleep(0.05)
        await stream.aclose()

    asyncio.run(run())
    assert source.num_given <= 3


def test_a_stream_that_is_never_read_never_starts() -> None:
    source = Source(1)

    async def run() -> None:
        await merge([source.stream()]).aclose()

    asyncio.run(run())
    assert (source.num_given, source.num_closed) == (0, 0)
