"""One request inside the engine: its tokens, its counters, what it holds."""

from dataclasses import dataclass, field

from actors.grammar import GrammarState
from actors.messages import FinishReason, GenerateRequest, SpeculationStats, TokenLogprobs
from actors.prefix import HashChain

# What counts as progress between two crashes. A replay alone emits a token or a block, also where
# what comes behind it kills.
PROGRESS_TOKENS = 16


@dataclass(slots=True, eq=False)
class Request:
    """`num_computed` tokens are known to have their KV, and steps whose output is unread feed up
    to `num_ahead` more: exactly as many, if every draft in them is accepted.

    The first `prefill_len` tokens, the prompt and, after a preemption, what had been emitted, are
    fed as prefill rows, but for those in front of `first_position`, which were cached; what comes
    after is known to the device already. The last planned row proposes `num_proposed` drafts, of
    which no row verifies more than `max_drafts`; a drafter's block begins below `draft_end`.

    `has_context` says whether the drafter knows all that was computed of it, without which it
    drafts nothing.

    `slot` and `pages` are held while the request runs, and by one that has ended or is to make room
    for others until nothing of it is ahead. The device knows the first `num_sent` of the pages,
    others may find the first `num_published`. `chain`, where prefixes are cached, names all of its
    full pages. `cached_tokens` is how much of the prompt was cached when it first started.
    `prompt_logprobs`, if asked for, are those of the computed prompt behind its first token.

    `num_crashes` counts the crashes of the device that it saw without progress since the one
    before, when it had emitted `emitted_at_crash`.

    A `grammar`, if there is one, stands behind what was emitted; then `drafts` are those that the
    last row proposed.
    """

    message: GenerateRequest
    stop_token_ids: frozenset[int]
    max_len: int
    max_drafts: int = 0
    draft_end: int = 0
    arrival: int = 0
    chain: HashChain | None = None
    grammar: GrammarState | None = None
    prefill_len: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_ahead: int = 0
    num_proposed: int = 0
    drafts: tuple[int, ...] = ()
    has_context: bool = True
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    first_position: int = 0
    num_sent: int = 0
    num_published: int = 0
    cached_tokens: int | None = None
    is_preempted: bool = False
    finish_reason: FinishReason | None = None
    num_crashes: int = 0
    emitted_at_crash: int = 0
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        message = self.message
        self.output_token_ids += message.emitted_token_ids
        self.emitted_at_crash = len(self.output_token_ids)
        self.prefill_len = self.num_tokens
        self.verify_steps = message.emitted_speculation.verify_steps
        self.draft_tokens = message.emitted_speculation.draft_tokens
        self.verified_output = message.emitted_speculation.emitted_tokens
        if self.chain is not None:
            self.chain.extend(message.prompt_token_ids + message.emitted_token_ids)
        if self.grammar is not None:
            self.grammar.commit(message.emitted_token_ids)

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Who has less goes first."""
        return (self.message.priority, self.arrival)

    @property
    def is_leaving(self) -> bool:
        """Whether it holds what it holds only until nothing of it is ahead."""
        return self.is_preempted or self.finish_reason is not None

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
    def draft_limit(self) -> int:
        """How many drafts any row of it may verify."""
        return self.max_drafts if self.has_context else 0

    @property
    def most_drafts(self) -> int:
        """How many drafts its next decode row may verify.

        The last token it may emit is never fed, nor are drafts that could not be emitted.
        """
        return min(self.draft_limit, self.num_proposed, self.num_left_ahead - 1)

    @property
    def may_draft(self) -> bool:
        """Whether its next row may verify drafts, or propose some."""
        within = self.num_proposed > 0 or self.next_position < self.draft_end
        return self.draft_limit > 0 and within

    @property
    def can_decode(self) -> bool:
        """Whether all its known tokens but the bonus are fed, and more may be emitted behind those
        that are ahead."""
        return self.next_position >= self.prefill_len and self.num_left_ahead > 0

    @property
    def must_wait(self) -> bool:
        """Whether its next decode row depends on an output that is unread."""
        return self.grammar is not None and self.num_ahead > 0

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

    def known_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions `start` to `stop`, which were given or emitted."""
        prompt = self.message.prompt_token_ids
        first, last = max(start - len(prompt), 0), max(stop - len(prompt), 0)
        return prompt[start:stop] + tuple(self.output_token_ids[first:last])

    def start(
        self, slot: int, pages: list[int], num_cached: int, *, has_context: bool = True
    ) -> None:
        """Run in this slot, behind `num_cached` tokens that the first of the pages hold."""
        self.slot, self.pages, self.has_context = slot, pages, has_context
        self.num_computed = self.first_position = num_cached
        self.num_sent = self.num_published = 0

    def restart(self) -> None:
        """Hold nothing, and feed all known tokens again."""
        assert self.num_ahead == 0
        self.slot, self.pages, self.is_preempted = None, [], False
        self.num_computed = self.num_proposed = 0
        self.prefill_len = self.num_tokens
        self.prompt_logprobs.clear()

    @property
    def progressed(self) -> bool:
        """Whether it has emitted enough since the last crash to be above suspicion."""
        return len(self.output_token_ids) >= self.emitted_at_crash + PROGRESS_TOKENS

    def count_crash(self) -> None:
        """Count a crash of the device while it ran."""
        self.num_crashes = 0 if self.progressed else self.num_crashes + 1
        self.emitted_at_crash = len(self.output_token_ids)

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
                token_ids = token_ids[:count]
                break
        if self.chain is not None:
            self.chain.extend(token_ids)
        return token_ids
