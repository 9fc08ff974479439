"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None = None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all `streams` as they come, each behind its stream's index.

    No stream is read far ahead of the consumer. The first stream to fail fails
    the whole, and however it ends, every stream is closed by then.
    """
    # One slot per stream: who waits for a bounded queue may be passed by those who do not.
    free = [asyncio.Semaphore() for _ in streams]
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue()

    async def read(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await free[index].acquire()
                    queue.put_nowait((index, item))
        except BaseException as error:  # a cancelled call of Ray's too
            queue.put_nowait(_End(error))
        else:
            queue.put_nowait(_End())

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                free[item[0]].release()
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
