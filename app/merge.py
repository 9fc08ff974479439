"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all `streams` as they come, each behind its stream's index.

    Nothing is read ahead of the consumer but one item per stream. The first stream to fail fails
    the whole, and however it ends, every stream is closed by then.
    """
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue(maxsize=1)

    async def read(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(_End(error))
        else:
            await queue.put(_End())

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
