"""One generation as both protocols see it: what was asked, what came, how it ended."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from actors.messages import SamplingParams, SpeculationStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template, each with `role` and `content`."""

    messages: tuple[Mapping[str, str], ...]


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInput:
    """What a client wants. `request_id` must be unique among the requests in flight.

    Every prompt gets `num_choices` outputs. `sampling` lacks `max_tokens`, `seed`, `choice` and
    `bad_words`. Without `max_tokens` it is `default_max_tokens`, as far as it fits, or all that
    fits; `max_tokens_param` is what the client calls it. Without `seed` each prompt gets a random
    one. `stop` ends a text before the first of its strings.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: partial[SamplingParams]
    num_choices: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    seed: int | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    max_draft_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """`cached_tokens` are those of the prompt. `speculation` is None without a drafter."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: SpeculationStats | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How one choice ended, and its usage alone."""

    reason: Literal["stop", "length"]
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a step added to one choice. Text may lag behind the tokens.

    `logprobs` has one entry per token, if asked for; `prompt_logprobs` comes with the first delta,
    `finish` with the last.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One accepted request.

    Choices are numbered through all prompts: the j-th of prompt i is `i * num_choices + j`. The
    engine starts with the first of `deltas`, each behind the index of its choice, and stops if they
    are closed; a choice that fails ends all.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    deltas: AsyncGenerator[tuple[int, Delta], None]

    async def result(self) -> tuple[Delta, ...]:
        """The whole of each choice. Raises what the engine raises."""
        parts: list[list[Delta]] = [[] for _ in range(len(self.prompts) * self.num_choices)]
        async with aclosing(self.deltas):
            async for index, delta in self.deltas:
                parts[index].append(delta)
        return tuple(_joined(of_choice) for of_choice in parts)

    @property
    def prompt_of_choices(self) -> tuple[tuple[int, ...], ...]:
        """The ids of the prompt of each choice."""
        return tuple(prompt for prompt in self.prompts for _ in range(self.num_choices))

    def usage(self, last_deltas: Sequence[Delta]) -> Usage:
        """That of all choices, by the last delta of each; what they share of a prompt counts once.

        The tokens of a prompt count as cached where they were for each of its choices.
        """
        usages = [delta.finish.usage for delta in last_deltas if delta.finish is not None]
        assert len(usages) == len(self.prompts) * self.num_choices
        each = [usages[i : i + self.num_choices] for i in range(0, len(usages), self.num_choices)]
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(min(u.cached_tokens for u in of_prompt) for of_prompt in each),
            speculation=_sum([u.speculation for u in usages if u.speculation is not None]),
        )


def _joined(deltas: Sequence[Delta]) -> Delta:
    assert deltas[-1].finish is not None
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
        finish=deltas[-1].finish,
    )


def _sum(stats: Sequence[SpeculationStats]) -> SpeculationStats | None:
    if not stats:
        return None
    names = [field.name for field in fields(SpeculationStats)]
    return SpeculationStats(**{n: sum(getattr(each, n) for each in stats) for n in names})
