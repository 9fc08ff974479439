"""How often a stream is told of its new tokens.

A message on its way to a client wakes four processes. Where they share the cores that the model
computes with, a message per step costs tokens per second, so a stream's chunks are gathered for a
while; the first and the last never wait.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from actors.messages import TokenChunk

# A stream that got nothing for so many intervals is forgotten, and begins anew.
_FORGOTTEN_AFTER = 10


@dataclass(slots=True)
class _Stream:
    sent_at: float
    held: TokenChunk | None = None


class Delivery:
    """Gathers each request's chunks for `interval_s`; with 0 all pass at once. One thread's."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._streams: dict[str, _Stream] = {}

    def push(self, chunks: Iterable[TokenChunk]) -> list[TokenChunk]:
        """Take a step's chunks; return those that are due, at most one per request."""
        if self._interval_s == 0:
            return list(chunks)
        now, due = self._clock(), []
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:
                due.append(chunk)
                self._streams[chunk.request_id] = _Stream(sent_at=now)
            else:
                stream.held = joined(stream.held, chunk) if stream.held else chunk
            if chunk.finish_reason is not None:
                stream = self._streams.pop(chunk.request_id)
                due += [stream.held] if stream.held else []
        for request_id, stream in list(self._streams.items()):
            waited_s = now - stream.sent_at
            if stream.held is not None and waited_s >= self._interval_s:
                due.append(stream.held)
                stream.held, stream.sent_at = None, now
            elif waited_s > _FORGOTTEN_AFTER * self._interval_s:
                del self._streams[request_id]
        return due


def joined(first: TokenChunk, then: TokenChunk) -> TokenChunk:
    """Two chunks of one request, one right behind the other, as one."""
    num_first = len(first.token_ids)
    assert then.first_index == first.first_index + num_first
    return replace(
        first,
        token_ids=first.token_ids + then.token_ids,
        finish_reason=then.finish_reason,
        speculation=then.speculation,
        earlier=(
            *first.earlier,
            (num_first, first.speculation),
            *((num_first + end, speculation) for end, speculation in then.earlier),
        ),
        logprobs=first.logprobs + then.logprobs,
    )
