"""Engines that recite tokens, and what the tiny checkpoint is made of."""

from collections.abc import AsyncGenerator, Sequence

from actors.messages import FinishReason, GenerateRequest, SpeculationStats, TokenChunk
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
        error: Exception | None = None,
    ) -> None:
        self.tokens = tuple(tokens)
        self.width = width
        self.finish_reason = finish_reason
        self.error = error
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        try:
            for first in range(0, len(self.tokens), self.width):
                run = self.tokens[first : first + self.width]
                last = first + len(run) == len(self.tokens) and self.error is None
                yield TokenChunk(
                    request_id=request.request_id,
                    first_index=first,
                    token_ids=run,
                    finish_reason=self.finish_reason if last else None,
                    speculation=STATS,
                )
            if self.error is not None:
                raise self.error
        finally:
            self.num_closed += 1


def replay(chunks: Sequence[TokenChunk]) -> Engine:
    """An engine that sends exactly these chunks."""

    async def engine(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        for chunk in chunks:
            yield chunk

    return engine
