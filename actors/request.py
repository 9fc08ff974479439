"""One request inside the engine: its tokens, its counters, what it holds."""

from dataclasses import dataclass, field

from actors.messages import FinishReason, GenerateRequest, SpeculationStats, TokenLogprobs


@dataclass(slots=True, eq=False)
class Request:
    """`num_computed` tokens are known to have their KV, and steps whose output is unread feed up
    to `num_ahead` more: exactly as many, if every draft in them is accepted.

    The first `prefill_len` tokens are fed as prefill rows; what comes after is known to the device
    already. The last planned row proposes `num_proposed` drafts. `slot` and `pages` are held while
    the request runs, and by one that has ended until nothing of it is ahead. `prompt_logprobs`, if
    asked for, are those of the computed prompt behind its first token.
    """

    message: GenerateRequest
    stop_token_ids: frozenset[int]
    max_len: int
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_ahead: int = 0
    num_proposed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

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
    def next_position(self) -> int:
        """Where the next row starts; optimistic for a decode row with something ahead."""
        return self.num_computed + self.num_ahead

    @property
    def num_left(self) -> int:
        """How many more tokens this request may emit, behind those that were read."""
        return self.max_len - self.num_tokens

    @property
    def num_left_ahead(self) -> int:
        """How many more it may emit behind those of unread steps, if these emit all they can."""
        # Behind a computed prompt one token is known that was not fed, the bonus.
        return self.max_len - max(self.num_tokens, self.next_position + 1)

    @property
    def held_slot(self) -> int:
        """The slot of a request that runs."""
        assert self.slot is not None
        return self.slot

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
