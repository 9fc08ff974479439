"""What a load is made of: requests in a closed loop, and when the tokens of each came."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, NamedTuple, Protocol

Mode = Literal["off", "dflash"]
Source = Literal["engine", "http"]


class LoadFailed(RuntimeError):
    """A request of a load failed; the message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One request. Times are in seconds, all of one clock.

    `verify_steps` gave `emitted_tokens` of its `num_tokens` output tokens; with speculation off
    they say nothing.
    """

    submitted_at: float
    first_token_at: float
    finished_at: float
    num_tokens: int
    verify_steps: int = 0
    emitted_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token, from submission."""
        return self.first_token_at - self.submitted_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None where there is no other."""
        if self.num_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_tokens - 1)


class Cell(NamedTuple):
    """What a row of the result is about."""

    source: Source
    mode: Mode
    concurrency: int


class Load(Protocol):
    """Something that answers prompts in one mode."""

    @property
    def source(self) -> Source: ...

    @property
    def mode(self) -> Mode: ...

    def run(
        self,
        texts: Sequence[str],
        max_tokens: int,
        concurrency: int,
        on_finish: Callable[[], None],
    ) -> tuple[Sample, ...]:
        """Answer each of `texts`, greedy, `concurrency` in flight: as one ends the next begins.

        `on_finish` is called as each ends. Raises `LoadFailed`.
        """


def tok_s(samples: Sequence[Sample]) -> float:
    """Output tokens per second of one run, from the first submission to the last end."""
    wall_s = max(s.finished_at for s in samples) - min(s.submitted_at for s in samples)
    return sum(s.num_tokens for s in samples) / wall_s


def repeated(texts: Sequence[str], at_least: int) -> list[str]:
    """`texts`, begun again where they are too few to keep `at_least` requests in flight."""
    return list(islice(cycle(texts), max(len(texts), at_least)))
