"""One generation as both protocols see it: what was asked, what came, how it ended."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from actors.messages import SpeculationStats


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template, each with `role` and `content`."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInput:
    """What a client wants. `request_id` must be unique among the requests in flight.

    Without `max_tokens` it is `default_max_tokens`, as far as it fits, or all that fits.
    `max_tokens_param` is what the client calls `max_tokens`.
    """

    request_id: str
    prompt: str | tuple[int, ...] | Chat
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """`speculation` is None without a drafter."""

    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    reason: Literal["stop", "length"]
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a step added. Text may lag behind the tokens. The last delta has `finish`."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    text: str
    token_ids: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One accepted request. The engine starts with the first delta, and stops if closed."""

    request_id: str
    deltas: AsyncGenerator[Delta, None]

    async def result(self) -> Result:
        """All of it at once. Raises what the engine raises."""
        async with aclosing(self.deltas):
            parts = [delta async for delta in self.deltas]
        finish = parts[-1].finish
        assert finish is not None
        return Result(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            finish=finish,
        )
