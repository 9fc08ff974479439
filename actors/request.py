"""One request inside the engine: its tokens, its counters, what it holds."""

from dataclasses import dataclass, field

from actors.messages import FinishReason, GenerateRequest, SpeculationStats


@dataclass(slots=True, eq=False)
class Request:
    """`num_computed` tokens have their KV; the rest of `num_tokens` is still to be fed.

    The first `prefill_len` tokens are fed as prefill rows; what comes after is known to the device
    already. `slot` and `pages` are held while the request runs.
    """

    message: GenerateRequest
    stop_token_ids: frozenset[int]
    max_len: int
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def prefill_len(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.message.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_left(self) -> int:
        """How many more tokens this request may emit."""
        return self.max_len - self.num_tokens

    @property
    def speculation(self) -> SpeculationStats:
        return SpeculationStats(
            verify_steps=self.verify_steps,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.verified_output - self.verify_steps,
            emitted_tokens=self.verified_output,
        )

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Take emitted tokens up to the one that ends the request; return those taken.

        The earliest end names the reason; a stop token at the length limit is a stop.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.output_token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                self.finish_reason = "stop"
            elif self.num_left == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return token_ids[:count]
        return token_ids
