"""Engines that recite tokens, and what the tiny checkpoint is made of."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from actors.messages import (
    FinishReason,
    GenerateRequest,
    SpeculationStats,
    TokenChunk,
    TokenLogprobs,
)
from app.service import Engine

EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_MODEL_LEN = 64

# Whatever came before the first chunk: enough that a cut in any chunk leaves it recognisable.
STATS = SpeculationStats(verify_steps=2, draft_tokens=60, accepted_tokens=30, emitted_tokens=50)


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up, and exact in JSON."""
    top = tuple((60 + i, -i / 4) for i in range(num_top))
    return TokenLogprobs(logprob=-token_id / 8, rank=5, top=top)


class Recital:
    """An engine that recites `tokens` in runs of `width`, and remembers how it was used.

    It raises `error` once the tokens are out, in place of the finish.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        width: int = 3,
        finish_reason: FinishReason = "stop",
        cached_tokens: int = 0,
        error: Exception | None = None,
    ) -> None:
        self.tokens = tuple(tokens)
        self.width = width
        self.finish_reason = finish_reason
        self.cached_tokens = cached_tokens
        self.error = error
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        num_top, num_prompt_top = request.sampling.logprobs, request.sampling.prompt_logprobs
        prompt_logprobs: list[TokenLogprobs | None] = []
        if num_prompt_top is not None:
            known = request.prompt_token_ids[1:]
            prompt_logprobs = [None, *(logprobs_of(token, num_prompt_top) for token in known)]
        try:
            for first in range(0, len(self.tokens), self.width):
                run = self.tokens[first : first + self.width]
                last = first + len(run) == len(self.tokens) and self.error is None
                logprobs = [] if num_top is None else [logprobs_of(token, num_top) for token in run]
                yield TokenChunk(
                    request_id=request.request_id,
                    first_index=first,
                    token_ids=run,
                    finish_reason=self.finish_reason if last else None,
                    speculation=STATS,
                    logprobs=tuple(logprobs),
                    prompt_logprobs=() if first else tuple(prompt_logprobs),
                    cached_tokens=0 if first else self.cached_tokens,
                )
                # As if it were a step: the other choices get theirs.
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.num_closed += 1


class Chorus:
    """An engine that gives the i-th choice of a request to the i-th recital."""

    def __init__(self, *recitals: Recital) -> None:
        self.recitals = recitals

    def __call__(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self.recitals[int(request.request_id.rpartition("-")[2])](request)

    @property
    def requests(self) -> list[GenerateRequest]:
        """In the order of the choices."""
        return [request for recital in self.recitals for request in recital.requests]

    @property
    def num_closed(self) -> int:
        return sum(recital.num_closed for recital in self.recitals)


def replay(chunks: Sequence[TokenChunk]) -> Engine:
    """An engine that sends exactly these chunks."""

    async def engine(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        for chunk in chunks:
            yield chunk

    return engine
