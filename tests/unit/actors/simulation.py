"""A scheduler beside a simulated device that accepts random drafts, and what is true of both.

The device is the truth about lengths and tokens: every request has one sequence, that of plain
generation, and a step reveals some of it.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.config import EngineConfig
from actors.limits import check_request
from actors.messages import (
    DecodeRow,
    FinishReason,
    GenerateRequest,
    PrefillRow,
    StepOutput,
    StepPlan,
    TokenChunk,
)
from actors.scheduler import Scheduler
from tests.unit.actors.builders import EOS, VOCAB

Row = DecodeRow | PrefillRow


@dataclass(eq=False)
class Client:
    """One request: what plain generation gives it, what it has seen, what the host may know.

    Its seed tells it from all others of a simulation.
    """

    message: GenerateRequest
    max_len: int
    stops: frozenset[int]
    plain: tuple[int, ...] = ()
    reason: FinishReason | None = None
    ended: bool = False
    aborted: bool = False
    wasted_rows: int = 0
    seen: tuple[int, ...] = ()
    fed: int = 0
    ahead: list[Row] = field(default_factory=list)  # of unread steps
    proposed: int = 0  # drafts, by the last row
    slot: int | None = None
    table: tuple[int, ...] = ()
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0

    def __post_init__(self) -> None:
        while self.reason is None:
            self.plain += self.tokens(len(self.plain), 1)
            if self.plain[-1] in self.stops:
                self.reason = "stop"
            elif len(self.prompt) + len(self.plain) == self.max_len:
                self.reason = "length"

    @property
    def id(self) -> str:
        return self.message.request_id

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.message.prompt_token_ids

    @property
    def seed(self) -> int:
        return self.message.sampling.seed

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """The target's tokens from output index `first` on; they know no end."""
        indices = range(first, first + count)
        return tuple(random.Random(f"{self.seed} {i}").randrange(VOCAB // 2) for i in indices)

    @property
    def left(self) -> int:
        return self.max_len - len(self.prompt) - len(self.seen)

    @property
    def start(self) -> int:
        """Where its next row starts, all drafts ahead taken as accepted."""
        return self.fed + sum(map(most_fed, self.ahead))

    @property
    def left_ahead(self) -> int:
        return self.left - sum(map(most_emitted, self.ahead))


def most_fed(row: Row) -> int:
    return row.num_drafts + 1 if isinstance(row, DecodeRow) else len(row.token_ids)


def most_emitted(row: Row) -> int:
    return row.num_drafts + 1 if isinstance(row, DecodeRow) else int(row.last)


def emitting_rows(plan: StepPlan) -> list[Row]:
    return [*plan.decode, *(row for row in plan.prefill if row.last)]


@dataclass(eq=False)
class DeviceSlot:
    """What the device remembers of a request; `fed` is true whatever the host believes."""

    client: Client
    fed: int = 0
    planned: int = 0
    emitted: int = 0
    drafts: int = 0


class Device:
    """Runs plans in the order in which they were submitted, as a rank does."""

    def __init__(self) -> None:
        self.slots: dict[int, DeviceSlot] = {}
        self.clients: dict[int, Client] = {}  # by seed

    def run(self, plan: StepPlan, rng: random.Random, acceptance: float) -> StepOutput:
        assert plan.bucket is not None
        proposed = plan.bucket.num_drafts
        for sampling in plan.samplings:
            self.slots[sampling.slot] = DeviceSlot(self.clients[sampling.seed])
        runs = [self.verify(row, proposed, rng, acceptance) for row in plan.decode]
        runs += [run for row in plan.prefill if (run := self.prefill(row, proposed))]
        drafts = [
            row.num_drafts if isinstance(row, DecodeRow) else 0 for row in emitting_rows(plan)
        ]
        return StepOutput(step=plan.step, sampled=tuple(runs), num_drafts=tuple(drafts))

    def verify(
        self, row: DecodeRow, proposed: int, rng: random.Random, acceptance: float
    ) -> tuple[int, ...]:
        slot = self.slots[row.slot]
        rejected = 1 + slot.planned - slot.emitted if row.prev_in_flight else 0
        assert row.position - rejected == slot.fed
        assert row.num_drafts <= slot.drafts, "drafts that nobody proposed"
        accepted = 0
        while accepted < row.num_drafts and rng.random() < acceptance:
            accepted += 1
        first = slot.fed - len(slot.client.prompt) + 1
        slot.planned, slot.emitted = row.num_drafts, accepted + 1
        slot.fed += slot.emitted
        slot.drafts = proposed if row.propose else 0
        return slot.client.tokens(first, slot.emitted)

    def prefill(self, row: PrefillRow, proposed: int) -> tuple[int, ...]:
        slot = self.slots[row.slot]
        end = row.start + len(row.token_ids)
        assert row.token_ids
        assert row.start == slot.fed
        assert row.fresh == (row.start == 0)
        assert row.token_ids == slot.client.prompt[row.start : end]
        assert row.last == (end == len(slot.client.prompt))
        assert row.next_token_id == (*slot.client.prompt, -1)[end]
        slot.fed = end
        if not row.last:
            return ()
        slot.planned, slot.emitted = 0, 1
        slot.drafts = proposed if row.propose else 0
        return slot.client.tokens(0, 1)


class Simulation:
    """`submit` and `read` in any order keep at most one step unread while one is planned."""

    def __init__(
        self,
        config: EngineConfig,
        leave_out_seed: int | None = None,
        drafts_seed: int | None = None,
    ) -> None:
        """`leave_out_seed` leaves random rows out; `drafts_seed` makes steps verify and propose a
        random choice of drafts, all by default."""
        self.config = config
        self.choice = config.num_drafts
        self.rng = random.Random(leave_out_seed)
        self.offered: list[str] = []
        self.left_out: str | None = None
        self.scheduler = Scheduler(
            config, leave_out=None if leave_out_seed is None else self.leave_out
        )
        if drafts_seed is not None:
            self.draft_rng = random.Random(drafts_seed)
            self.scheduler.speculation.choose = self.choose  # type: ignore[method-assign]
        self.device = Device()
        self.clients: list[Client] = []
        self.waiting: list[Client] = []
        self.running: list[Client] = []  # in order of admission, also ended ones that are unread
        self.unread: deque[tuple[StepPlan, StepOutput]] = deque()
        self.finished: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.emitted = self.verify_steps = self.draft_tokens = self.prompt_tokens = 0

    @property
    def live(self) -> list[Client]:
        return [client for client in self.running if not client.ended]

    def add(self, message: GenerateRequest) -> Client:
        check_request(self.config, message)
        self.scheduler.add(message)
        sampling = message.sampling
        end = len(message.prompt_token_ids) + sampling.max_tokens
        stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
        client = Client(message, min(self.config.max_model_len, end), frozenset(stops))
        assert client.seed not in self.device.clients
        self.device.clients[client.seed] = client
        self.clients.append(client)
        self.waiting.append(client)
        self.prompt_tokens += len(client.prompt)
        return client

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        for client in self.clients:
            if client.id == request_id and not client.ended:
                client.ended = client.aborted = True
                self.finished["abort"] += 1
        self.waiting = [client for client in self.waiting if not client.ended]
        self.check()

    def choose(self, decode_rows: int) -> int:
        assert decode_rows in self.config.buckets.decode_sequences
        widths = self.config.buckets.verify_widths
        self.choice = self.draft_rng.choice([0, *(width - 1 for width in widths)])
        return self.choice

    def leave_out(self, request_ids: Sequence[str]) -> str | None:
        self.offered = list(request_ids)
        self.left_out = self.rng.choice([*request_ids, None])
        return self.left_out

    def submit(self, rng: random.Random, acceptance: float) -> StepPlan:
        assert len(self.unread) <= 1
        self.admit()
        decode, chunks = self.expected()
        plan = self.scheduler.schedule()
        chosen = [client.id for client in (*decode, *chunks)]
        if self.scheduler._leave_out is not None:
            assert sorted(self.offered) == sorted(chosen)
            if len(chosen) > 1 or self.unread:
                decode = [client for client in decode if client.id != self.left_out]
                chunks = {c: count for c, count in chunks.items() if c.id != self.left_out}
            self.offered, self.left_out = [], None
        assert (plan.bucket is not None) == bool(decode or chunks)
        assert plan.bucket is not None or self.unread or not self.live
        if plan.bucket is None:
            assert plan == StepPlan(step=plan.step)
            return plan
        self.check_pages(plan)
        self.check_prefill(plan, chunks)
        self.check_decode(plan, decode)
        for row in (*plan.decode, *plan.prefill):
            self.holder(row.slot).ahead.append(row)
        self.check_bucket(plan)
        for row in emitting_rows(plan):
            self.holder(row.slot).proposed = self.choice if row.propose else 0
        self.unread.append((plan, self.device.run(plan, rng, acceptance)))
        self.check()
        return plan

    def read(self) -> list[TokenChunk]:
        plan, output = self.unread.popleft()
        chunks = self.scheduler.update(output, seconds=0.01)
        for row in (*plan.decode, *plan.prefill):
            assert self.holder(row.slot).ahead.pop(0) == row
        for row in plan.prefill:
            self.holder(row.slot).fed += len(row.token_ids)
        found = iter(chunks)
        for row, run in zip(emitting_rows(plan), output.sampled, strict=True):
            client = self.holder(row.slot)
            if client.ended:
                client.wasted_rows += 1
            else:
                self.check_chunk(next(found), client, row, run)
        assert next(found, None) is None
        self.running = [c for c in self.running if c.ahead or not c.ended]
        self.check()
        return chunks

    def drain(self, rng: random.Random, acceptance: float, ahead: bool) -> list[TokenChunk]:
        """To the end, as an engine does: a step is read before the next is planned, or after."""
        chunks: list[TokenChunk] = []
        # A step feeds a token of the oldest request, unless it waits or is left out.
        most = 8 + 4 * sum(client.max_len for client in (*self.waiting, *self.running))
        while self.scheduler.has_work:
            most -= 1
            assert most >= 0, "a request does not progress"
            num_before = len(self.unread)
            if num_before < 2:
                self.submit(rng, acceptance)
            for _ in range(num_before if ahead else len(self.unread)):
                chunks += self.read()
        self.scheduler.check_idle()
        assert not self.waiting
        assert not self.running
        return chunks

    def holder(self, slot: int) -> Client:
        (client,) = (client for client in self.running if client.slot == slot)
        return client

    def admit(self) -> None:
        """Oldest first, and nobody waits while a slot and the pages are free."""
        held = sum(self.pages_of(client) for client in self.running)
        while self.waiting and len(self.running) < self.config.num_slots:
            held += self.pages_of(self.waiting[0])
            if held > self.config.num_kv_pages - 1:
                break
            self.running.append(self.waiting.pop(0))

    def pages_of(self, client: Client) -> int:
        return -(-(client.max_len - 1) // self.config.block_size)

    def expected(self) -> tuple[list[Client], dict[Client, int]]:
        """Everyone who may decode is in the step; prefill gets the rest of it, oldest first."""
        decode = [c for c in self.live if c.start >= len(c.prompt) and c.left_ahead > 0]
        left = self.config.max_num_batched_tokens - len(decode) * (self.config.num_drafts + 1)
        assert left >= 0
        chunks = {}
        for client in self.live:
            if wanted := min(left, max(0, len(client.prompt) - client.start)):
                chunks[client] = wanted
                left -= wanted
        return decode, chunks

    def check_pages(self, plan: StepPlan) -> None:
        """Pages and sampling come with the first row, into a slot that no unread row is in."""
        updates = {update.slot: update for update in plan.page_updates}
        samplings = {sampling.slot: sampling for sampling in plan.samplings}
        assert len(updates) == len(plan.page_updates) == len(samplings) == len(plan.samplings)
        fresh = {row.slot: row for row in plan.prefill if row.fresh}
        assert set(updates) == set(samplings) == set(fresh)
        for slot in fresh:
            assert 0 <= slot < self.config.num_slots
            assert all(slot != r.slot for p, _ in self.unread for r in (*p.decode, *p.prefill))
            assert all(slot != client.slot for client in self.running), "a slot that is held"
            seed = samplings[slot].seed
            (client,) = (client for client in self.running if client.seed == seed)
            assert samplings[slot].temperature == client.message.sampling.temperature
            assert samplings[slot].prompt_len == len(client.prompt)
            assert updates[slot].first == 0
            client.slot, client.table = slot, updates[slot].pages
            assert len(client.table) == self.pages_of(client)
        pages = [page for client in self.running for page in client.table]
        assert len(pages) == len(set(pages))
        assert all(0 < page < self.config.num_kv_pages for page in pages)

    def check_prefill(self, plan: StepPlan, expected: dict[Client, int]) -> None:
        found: Counter[Client] = Counter()
        for row in plan.prefill:
            client = self.holder(row.slot)
            found[client] += len(row.token_ids)
            if row.last:
                assert row.propose == (self.choice > 0 and client.left - 1 >= 2)
        assert found == expected

    def check_decode(self, plan: StepPlan, expected: list[Client]) -> None:
        assert [self.holder(row.slot) for row in plan.decode] == expected
        before = self.unread[-1][0] if self.unread else StepPlan(step=0)
        for row, client in zip(plan.decode, expected, strict=True):
            assert row.prev_in_flight == (row.slot in [r.slot for r in emitting_rows(before)])
            assert row.prev_in_flight == bool(client.ahead)
            assert row.position == client.start
            # Speculation is never off where a draft could still be emitted.
            assert row.num_drafts == min(self.choice, client.proposed, client.left_ahead - 1)
            # Nor are drafts not made which a next step may verify, whatever is rejected till then.
            most_left = client.left - row.prev_in_flight - 1
            assert row.propose == (self.choice > 0 and most_left >= 2)

    def check_bucket(self, plan: StepPlan) -> None:
        bucket, size = plan.bucket, self.config.block_size
        assert bucket is not None
        assert len(plan.decode) <= bucket.decode_rows <= self.config.max_num_seqs
        width = 1 + max((row.num_drafts for row in plan.decode), default=0)
        widths = self.config.buckets.verify_widths
        assert bucket.verify_width == min(w for w in widths if w >= width)
        assert bucket.num_drafts == (self.choice if emitting_rows(plan) else 0)
        assert len(plan.prefill) <= bucket.prefill_rows
        assert len(emitting_rows(plan)) <= bucket.emitting_rows <= self.config.max_num_seqs
        grids = bucket.decode_rows * bucket.verify_width
        grids += bucket.prefill_rows * bucket.prefill_width
        assert bucket.num_tokens >= max(grids, 2)
        assert all(len(row.token_ids) <= bucket.prefill_width for row in plan.prefill)
        assert bucket.context_pages <= self.config.pages_per_request
        ends = [(row.slot, row.position + row.num_drafts + 1) for row in plan.decode]
        ends += [(row.slot, row.start + len(row.token_ids)) for row in plan.prefill]
        for slot, end in ends:
            client = self.holder(slot)
            assert end <= len(client.table) * size
            assert end <= bucket.context_pages * size
            # The last token of a request is emitted and never fed.
            assert end < client.max_len <= self.config.max_model_len

    def check_chunk(
        self, chunk: TokenChunk, client: Client, row: Row, run: tuple[int, ...]
    ) -> None:
        """The chunk continues the plain output, and ends where and why that ends."""
        first = len(client.seen)
        kept = client.plain[first : first + len(run)]
        client.seen += kept
        client.ended = client.seen == client.plain
        assert chunk.request_id == client.id
        assert chunk.first_index == first
        assert chunk.token_ids == kept
        assert chunk.finish_reason == (client.reason if client.ended else None)
        self.emitted += len(kept)
        if isinstance(row, DecodeRow):
            client.fed += len(run)
            client.verify_steps += 1
            client.draft_tokens += row.num_drafts
            client.verified_output += len(kept)
            self.verify_steps += 1
            self.draft_tokens += row.num_drafts
            self.accepted_at.update(range(len(kept) - 1))
        stats = chunk.speculation
        assert stats.verify_steps == client.verify_steps
        assert stats.draft_tokens == client.draft_tokens
        assert stats.emitted_tokens == client.verified_output == len(client.seen) - 1
        assert stats.accepted_tokens == stats.emitted_tokens - stats.verify_steps
        assert stats.accepted_tokens <= stats.draft_tokens
        if chunk.finish_reason is not None:
            self.finished[chunk.finish_reason] += 1

    def check(self) -> None:
        """What holds between any two calls."""
        self.running = [c for c in self.running if c.ahead or not c.ended]
        scheduler, stats = self.scheduler, self.scheduler.stats
        live = len(self.live) + len(self.waiting)
        assert scheduler.num_requests == live
        assert scheduler.num_unread == len(self.unread)
        assert scheduler.has_work == bool(live or self.unread)
        assert stats.requests == self.finished
        assert stats.prompt_tokens == self.prompt_tokens
        assert stats.output_tokens == self.emitted
        assert stats.verify_steps == self.verify_steps
        assert stats.draft_tokens == self.draft_tokens
        assert stats.accepted_at == self.accepted_at
        assert stats.accepted_tokens == self.accepted_at.total()
        # A stop that is read late costs one row at most, a limit is known before.
        for client in self.clients:
            assert client.aborted or client.wasted_rows <= (client.reason == "stop")
        scheduler.pool.check()
        held = sum(self.pages_of(client) for client in self.running)
        assert scheduler.pool.num_free == scheduler.pool.num_usable - held
        for client in self.live:
            # Exactly the full pages of positions known to be fed, and none without a drafter.
            full = client.fed // self.config.block_size if self.config.drafter else 0
            for index, page in enumerate(client.table):
                assert scheduler.pool.drafter_valid(page) == (index < full)
