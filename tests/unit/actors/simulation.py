"""A scheduler beside a simulated device that accepts random drafts, and what is true of both.

The device is the truth about lengths and tokens: every request has one sequence, that of plain
generation, and a step reveals some of it.
"""

import random
from bisect import insort
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
from actors.prefix import page_hashes
from actors.scheduler import Scheduler
from tests.unit.actors.builders import EOS, VOCAB
from tests.unit.actors.fake_grammar import FORBIDDEN, FakeGrammars, allowed, masks_behind

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
    has_context: bool = True  # all that is fed is known to the drafter
    slot: int | None = None
    table: tuple[int, ...] = ()  # as the device knows it
    pages: tuple[int, ...] = ()  # held
    num_new: int = 0  # more of them, in the step that is planned
    arrival: int = 0
    hits: int = 0
    cached: int | None = None
    preempted: bool = False
    prefill_len: int = 0
    drawn: list[int] = field(default_factory=list)
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0

    def __post_init__(self) -> None:
        self.prefill_len = len(self.prompt)
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

    @property
    def is_guided(self) -> bool:
        return self.message.sampling.guide is not None

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """The target's tokens from output index `first` on; they know no end."""
        while len(self.drawn) < first + count:
            rng = random.Random(f"{self.seed} {len(self.drawn)}")
            self.drawn.append(rng.randrange(VOCAB // 2))
        return tuple(self.drawn[first : first + count])

    def sequence(self, length: int) -> tuple[int, ...]:
        """Its first tokens, prompt and output."""
        return self.prompt[:length] + self.tokens(0, max(length - len(self.prompt), 0))

    @property
    def order(self) -> tuple[int, int]:
        return (self.message.priority, self.arrival)

    @property
    def can_decode(self) -> bool:
        return self.start >= self.prefill_len and self.left_ahead > 0

    def allowed_drafts(self, num_drafts: int) -> int:
        """How many its request allows, of so many."""
        cap = self.message.max_draft_tokens
        return num_drafts if cap is None else min(num_drafts, cap)

    def most_drafts(self, num_drafts: int) -> int:
        """How many can be had, of so many."""
        return self.allowed_drafts(num_drafts) if self.has_context else 0

    @property
    def reads_history(self) -> bool:
        return self.message.sampling.presence_penalty != 0

    def requeue(self) -> None:
        """Preempted, with nothing unread."""
        self.slot, self.pages, self.table, self.preempted = None, (), (), False
        self.fed = self.proposed = self.num_new = 0
        self.prefill_len = len(self.prompt) + len(self.seen)

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
    drafts: tuple[int, ...] = ()


class Device:
    """Runs plans in the order in which they were submitted, as a rank does.

    A page's content is, for each of its positions, the whole sequence that the KV there is of;
    `injected` is the same of the drafter's KV, while there is one.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, DeviceSlot] = {}
        self.clients: dict[int, Client] = {}  # by seed
        self.tables: dict[int, dict[int, int]] = {}
        self.content: dict[tuple[int, int], tuple[str, tuple[int, ...]] | None] = {}
        self.injected: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.has_drafter = True

    def lose(self) -> None:
        self.slots.clear()
        self.tables.clear()
        self.content.clear()
        self.join()

    def lose_drafter(self) -> None:
        self.injected.clear()
        self.has_drafter = False

    def join(self) -> None:
        """Another drafter, that knows nothing."""
        self.injected.clear()
        self.has_drafter = True

    def run(self, plan: StepPlan, rng: random.Random, acceptance: float) -> StepOutput:
        assert plan.bucket is not None
        for update in plan.page_updates:
            table = self.tables.setdefault(update.slot, {})
            table.update(enumerate(update.pages, start=update.first))
        for sampling in plan.samplings:
            self.slots[sampling.slot] = DeviceSlot(self.clients[sampling.seed])
        emitting, lost = emitting_rows(plan), not self.has_drafter
        verified = [self.num_verified(row) for row in emitting]
        runs = [self.verify(row, rng, acceptance) for row in plan.decode]
        runs += [run for row in plan.prefill if (run := self.prefill(row))]
        for row in emitting:
            count = plan.bucket.num_drafts if row.propose and self.has_drafter else 0
            if count:
                self.check_context(row.slot)
            tokens = (rng.choice([7, 8, 9, 10, FORBIDDEN]) for _ in range(count))
            self.slots[row.slot].drafts = tuple(tokens)
        drafts = (self.slots[row.slot].drafts for row in emitting)
        return StepOutput(
            step=plan.step,
            sampled=tuple(runs),
            num_drafts=tuple(verified),
            drafts=tuple(drafts) if plan.bucket.guided else (),
            drafters_lost=lost,
        )

    def num_verified(self, row: Row) -> int:
        """A lost drafter proposed fewer than planned."""
        if isinstance(row, PrefillRow):
            return 0
        drafts = self.slots[row.slot].drafts
        assert not self.has_drafter or row.num_drafts <= len(drafts), "drafts that nobody proposed"
        return min(row.num_drafts, len(drafts))

    def check_context(self, slot_id: int) -> None:
        """The drafter knows all that the slot's next block may look back at."""
        slot, table = self.slots[slot_id], self.tables[slot_id]
        for position in range(slot.fed):
            known = slot.client.message.cache_salt, slot.client.sequence(position + 1)
            place = table[position // self.page_size], position % self.page_size
            assert self.injected.get(place) == known, "a draft from what the drafter never saw"

    def knows(self, page: int) -> bool:
        """Whether the drafter has all of what the page holds."""
        places = [(page, offset) for offset in range(self.page_size)]
        return all(p in self.injected and self.injected[p] == self.content[p] for p in places)

    def verify(self, row: DecodeRow, rng: random.Random, acceptance: float) -> tuple[int, ...]:
        slot = self.slots[row.slot]
        rejected = 1 + slot.planned - slot.emitted if row.prev_in_flight else 0
        assert row.position - rejected == slot.fed
        accepted, verified = 0, self.num_verified(row)
        while accepted < verified and rng.random() < acceptance:
            accepted += 1
        first = slot.fed - len(slot.client.prompt) + 1
        slot.planned, slot.emitted = row.num_drafts, accepted + 1
        self.feed(row.slot, slot.emitted, verified - accepted)
        return slot.client.tokens(first, slot.emitted)

    def prefill(self, row: PrefillRow) -> tuple[int, ...]:
        slot = self.slots[row.slot]
        client = slot.client
        if row.fresh:
            slot.fed = row.start
        end = row.start + len(row.token_ids)
        assert row.token_ids
        assert row.start == slot.fed
        assert row.token_ids == client.sequence(end)[row.start :]
        assert row.last == (end == client.prefill_len)
        known = client.sequence(client.prefill_len)
        assert row.next_token_id == (*known, -1)[end]
        self.feed(row.slot, len(row.token_ids), 0)
        if not row.last:
            return ()
        slot.planned, slot.emitted = 0, 1
        return client.tokens(end - len(client.prompt), 1)

    def feed(self, slot_id: int, num_kept: int, num_rejected: int) -> None:
        """Read all KV in front of these tokens, and write theirs."""
        slot, size = self.slots[slot_id], self.page_size
        salt = slot.client.message.cache_salt
        end = slot.fed + num_kept
        sequence = slot.client.sequence(end)
        table = self.tables[slot_id]
        for position in range(end + num_rejected):
            place = table[position // size], position % size
            if position >= slot.fed:
                kept = (salt, sequence[: position + 1]) if position < end else None
                self.content[place] = kept
                if kept and self.has_drafter:
                    self.injected[place] = kept
            else:
                assert self.content[place] == (salt, sequence[: position + 1]), "another's KV"
        slot.fed = end


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
            config,
            grammars=FakeGrammars(),
            leave_out=None if leave_out_seed is None else self.leave_out,
        )
        self.chooses = drafts_seed is not None
        if drafts_seed is not None:
            self.draft_rng = random.Random(drafts_seed)
            self.scheduler.speculation.choose = self.choose  # type: ignore[method-assign]
        self.device = Device(config.block_size)
        self.clients: list[Client] = []
        self.waiting: list[Client] = []
        self.running: list[Client] = []  # in order of admission, also ended ones that are unread
        self.unread: deque[tuple[StepPlan, StepOutput]] = deque()
        self.finished: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.emitted = self.verify_steps = self.draft_tokens = self.prompt_tokens = 0
        self.preemptions = self.queries = self.hits = 0
        self.is_short, self.may_admit = False, True
        self.has_drafter, self.drafter_losses = config.drafter is not None, 0

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
        client.arrival = len(self.clients)
        self.clients.append(client)
        insort(self.waiting, client, key=lambda other: other.order)
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

    def crash(self) -> None:
        """The device and whatever was on its way are lost; the first time, nobody is suspected."""
        assert self.scheduler.restart() == []
        self.unread.clear()
        self.device.lose()
        self.has_drafter = self.config.drafter is not None
        for client in list(self.running):
            client.ahead.clear()
            self.running.remove(client)
            if not client.ended:
                client.requeue()
                insort(self.waiting, client, key=lambda other: other.order)
        self.check()

    def lose_drafter(self, noticed: bool) -> None:
        """The host finds out at once, or where a later step says so."""
        self.device.lose_drafter()
        if noticed and self.has_drafter:
            self.notice_loss()
        self.check()

    def notice_loss(self) -> None:
        self.scheduler.lose_drafter()
        self.has_drafter = False
        self.drafter_losses += 1
        for client in self.running:
            client.has_context = False

    def regain_drafter(self) -> None:
        """Where the host knows of a loss, another drafter joins between two steps."""
        while self.unread:
            self.read()
        if not self.has_drafter:
            self.device.join()
            self.scheduler.regain_drafter()
            self.has_drafter = True
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
        was_running = {client: client.fed for client in self.running}
        plan = self.scheduler.schedule()
        decode, chunks = self.expected()
        self.check_hits(was_running)
        chosen = [client.id for client in (*decode, *chunks)]
        if self.scheduler._leave_out is not None:
            assert sorted(self.offered) == sorted(chosen)
            if len(chosen) > 1 or self.unread:
                decode = [client for client in decode if client.id != self.left_out]
                chunks = {c: count for c, count in chunks.items() if c.id != self.left_out}
            self.offered, self.left_out = [], None
        assert (plan.bucket is not None) == bool(decode or chunks)
        assert plan.bucket is not None or self.unread or not (self.live or self.waiting)
        self.check_held()
        if plan.bucket is None:
            assert plan == StepPlan(step=plan.step)
            return plan
        self.check_pages(plan)
        emitting = [self.holder(row.slot) for row in emitting_rows(plan)]
        if not any(self.may_draft(client) for client in emitting):
            self.choice = 0
        elif not self.chooses:
            self.choice = self.config.num_drafts
        self.check_prefill(plan, chunks)
        self.check_decode(plan, decode)
        for row in (*plan.decode, *plan.prefill):
            self.holder(row.slot).ahead.append(row)
        self.check_bucket(plan)
        for row in emitting_rows(plan):
            client = self.holder(row.slot)
            client.proposed = client.most_drafts(self.choice) if row.propose else 0
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
        emitted = zip(emitting_rows(plan), output.sampled, output.num_drafts, strict=True)
        for row, run, verified in emitted:
            client = self.holder(row.slot)
            if client.ended:
                client.wasted_rows += 1
            else:
                self.check_chunk(next(found), client, row, run, verified)
        assert next(found, None) is None
        self.leave()
        if output.drafters_lost and self.has_drafter:
            self.notice_loss()
        self.check()
        return chunks

    def drain(self, rng: random.Random, acceptance: float, ahead: bool) -> list[TokenChunk]:
        """To the end, as an engine does: a step is read before the next is planned, or after."""
        chunks: list[TokenChunk] = []
        # A step feeds a token of the first request, unless it waits or is left out.
        most = 8 + 16 * sum(client.max_len for client in (*self.waiting, *self.running))
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

    def may_draft(self, client: Client) -> bool:
        is_within = client.proposed > 0 or self.block_fits(client.start)
        return is_within and client.most_drafts(self.config.num_drafts) > 0

    def block_fits(self, bonus: int) -> bool:
        drafter = self.config.drafter
        if drafter is None:
            return False
        return bonus + drafter.num_drafts < drafter.decoder.max_position_embeddings

    def holder(self, slot: int) -> Client:
        (client,) = (client for client in self.running if client.slot == slot)
        return client

    def leave(self) -> None:
        """Those that ended or were preempted go once nothing of them is unread."""
        for client in list(self.running):
            if client.ahead or not (client.ended or client.preempted):
                continue
            self.running.remove(client)
            if not client.ended:
                client.requeue()
                insort(self.waiting, client, key=lambda other: other.order)

    @property
    def num_free(self) -> int:
        """Nobody holds them; a page that several hold is one."""
        held = {page for client in self.running for page in client.pages}
        num_new = sum(client.num_new for client in self.running)
        return self.config.num_kv_pages - 1 - len(held) - num_new

    def num_pages(self, end: int) -> int:
        return -(-end // self.config.block_size)

    def expected(self) -> tuple[list[Client], dict[Client, int]]:
        """In order, everyone gets the pages of its next row, from the last if there are no more.

        Everyone who may decode is in the step, guided ones whose output was read; prefill gets the
        rest of it. Where only guided ones are left, they wait for each other.
        """
        running = [client for client in self.live if not client.preempted]
        order = sorted([*running, *self.waiting], key=lambda client: client.order)
        widest = self.config.num_drafts + 1
        left = self.config.max_num_batched_tokens - widest * sum(c.can_decode for c in running)
        assert left >= 0
        self.is_short, self.may_admit = False, True
        decode, chunks, waiting = [], {}, False
        for client in order:
            if client.preempted:
                continue
            if client in running and client.can_decode:
                if client.is_guided and client.ahead:
                    waiting = True
                    continue
                most = client.most_drafts(self.config.num_drafts)
                drafts = min(most, client.proposed, client.left_ahead - 1)
                if self.grow(client, client.start + drafts + 1):
                    decode.append(client)
            elif left and (client not in self.waiting or self.admit(client, left)):
                wanted = min(left, max(0, client.prefill_len - client.start))
                if wanted and self.grow(client, client.start + wanted):
                    chunks[client] = wanted
                    left -= wanted
        if waiting and all(client.is_guided for client in (*decode, *chunks)):
            return [], {}
        return decode, chunks

    def grow(self, client: Client, end: int) -> bool:
        needed = self.num_pages(end) - len(client.pages) - client.num_new
        while needed > 0 and (self.is_short or needed > self.num_free):
            if not self.preempt([c for c in self.running if c.order > client.order]):
                return False
        client.num_new += max(needed, 0)
        return True

    def admit(self, client: Client, left: int) -> bool:
        if not self.may_admit or len(self.running) == self.config.num_slots:
            return False
        request = self.scheduler._requests[client.id]
        if request.slot is None:
            shared = self.lookup(client)
        else:
            shared = request.pages[: request.first_position // self.config.block_size]
        start = len(shared) * self.config.block_size
        needed = self.num_pages(min(client.prefill_len, start + left)) - len(shared)
        while True:
            held = {page for other in self.running for page in other.pages}
            if needed <= self.num_free - len(set(shared) - held):
                break
            if not self.preempt([c for c in self.running if c.order > client.order]):
                return False
        assert client == min(self.waiting, key=lambda other: other.order)
        self.waiting.remove(client)
        self.running.append(client)
        client.pages, client.num_new = tuple(shared), needed
        client.fed = client.hits = start
        valid = map(self.scheduler.pool.drafter_valid, shared)
        client.has_context = self.has_drafter and all(valid)
        if client.cached is None:
            client.cached = start
            if self.looks_up(client):
                self.queries += len(client.prompt)
                self.hits += start
        return True

    def preempt(self, victims: list[Client]) -> bool:
        """The last of them; False where pages come only with an output, or not at all."""
        self.may_admit = False
        if self.is_short or not victims or any(c.ended or c.preempted for c in self.running):
            self.is_short = True
            return False
        victim = max(victims, key=lambda client: client.order)
        victim.preempted = True
        self.preemptions += 1
        self.leave()
        return True

    def looks_up(self, client: Client) -> bool:
        asks = client.message.sampling.prompt_logprobs is not None
        return self.config.enable_prefix_caching and not asks

    def lookup(self, client: Client) -> list[int]:
        if not self.looks_up(client):
            return []
        size = self.config.block_size
        known = client.sequence((client.prefill_len - 1) // size * size)
        hashes = page_hashes(known, size, client.message.cache_salt)
        speculates = self.has_drafter and client.allowed_drafts(self.config.num_drafts) > 0
        return self.scheduler.pool.lookup(hashes, need_drafter=speculates)

    def check_hits(self, was_running: dict[Client, int]) -> None:
        """What a request that runs has computed is found by one that starts.

        Not for sure after evictions: of two pages with one content only the first is known, and
        may have been forgotten while the other is held. Nor after the loss of a drafter.
        """
        size = self.config.block_size
        is_sure = not self.scheduler.stats.evicted_pages and not self.drafter_losses
        for client in self.running:
            if client in was_running:
                continue
            assert client.hits % size == 0
            assert client.hits < client.prefill_len
            assert self.looks_up(client) or client.hits == 0
            for other, fed in was_running.items():
                if not (is_sure and self.looks_up(client)):
                    continue
                if other.message.cache_salt == client.message.cache_salt:
                    length = min(fed, client.prefill_len - 1)
                    pairs = zip(other.sequence(length), client.sequence(length), strict=True)
                    same = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
                    assert client.hits >= same // size * size

    def check_held(self) -> None:
        """Everyone holds as many pages as they need, and none that another writes to."""
        for client in self.running:
            if client.ended:
                continue
            pages = self.scheduler._requests[client.id].pages
            assert len(pages) == len(client.pages) + client.num_new
            assert tuple(pages[: len(client.pages)]) == client.pages
            client.pages, client.num_new = tuple(pages), 0
            assert all(0 < page < self.config.num_kv_pages for page in pages)
            assert len(set(pages)) == len(pages)

    def check_pages(self, plan: StepPlan) -> None:
        """A row's pages come with it, and into a slot that no unread row of another is in; so does
        how it is sampled."""
        samplings = {sampling.slot: sampling for sampling in plan.samplings}
        fresh = [row for row in plan.prefill if row.fresh]
        assert [sampling.slot for sampling in plan.samplings] == [row.slot for row in fresh]
        for row in fresh:
            assert 0 <= row.slot < self.config.num_slots
            assert all(row.slot != r.slot for p, _ in self.unread for r in p.rows)
            assert all(row.slot != client.slot for client in self.running), "a held slot"
            sampling = samplings[row.slot]
            (client,) = (client for client in self.running if client.seed == sampling.seed)
            assert sampling.temperature == client.message.sampling.temperature
            assert sampling.prompt_len == len(client.prompt)
            # Whoever reads a history has it from the host where nothing was computed.
            history = client.sequence(row.start) if client.reads_history else ()
            assert sampling.history == history
            assert client.table == ()
            assert row.start == client.hits
            client.slot = row.slot
        updates = {update.slot: update for update in plan.page_updates}
        assert len(updates) == len(plan.page_updates)
        assert all(update.pages for update in plan.page_updates)
        rows = {row.slot for row in plan.rows}
        assert updates.keys() <= rows
        for slot in rows:
            client = self.holder(slot)
            if slot in updates:
                assert updates[slot].first == len(client.table)
                client.table += updates[slot].pages
            assert client.table == client.pages

    def check_prefill(self, plan: StepPlan, expected: dict[Client, int]) -> None:
        found: Counter[Client] = Counter()
        for row in plan.prefill:
            client = self.holder(row.slot)
            found[client] += len(row.token_ids)
            if row.last:
                fits = self.block_fits(client.prefill_len)
                drafts = client.most_drafts(self.choice) > 0
                assert row.propose == (drafts and fits and client.left - 1 >= 2)
            guided = row.last and client.is_guided
            assert row.masks == (tuple(masks_behind(client.seen)) if guided else ())
        assert found == expected

    def check_decode(self, plan: StepPlan, expected: list[Client]) -> None:
        assert [self.holder(row.slot) for row in plan.decode] == expected
        before = self.unread[-1][0] if self.unread else StepPlan(step=0)
        for row, client in zip(plan.decode, expected, strict=True):
            assert row.prev_in_flight == (row.slot in [r.slot for r in emitting_rows(before)])
            assert row.prev_in_flight == bool(client.ahead)
            assert row.position == client.start
            # Speculation is never off where a draft could still be emitted.
            most = client.most_drafts(self.choice)
            num_drafts = max(0, min(most, client.proposed, client.left_ahead - 1))
            if client.is_guided:
                drafts = tuple(allowed(self.device.slots[row.slot].drafts[:num_drafts]))
                assert row.masks == tuple(masks_behind(client.seen, drafts))
                num_drafts = len(drafts)
            else:
                assert row.masks == ()
            assert row.num_drafts == num_drafts
            # Nor are drafts not made which a next step may verify, whatever is rejected till then.
            most_left = client.left - row.prev_in_flight - 1
            fits = self.block_fits(row.position + row.num_drafts + 1)
            assert row.propose == (most > 0 and fits and most_left >= 2)

    def check_bucket(self, plan: StepPlan) -> None:
        bucket, size = plan.bucket, self.config.block_size
        assert bucket is not None
        reads = any(self.holder(row.slot).reads_history for row in plan.rows)
        assert bucket.choosing == ("shaped" if reads else "greedy")
        assert len(plan.decode) <= bucket.decode_rows <= self.config.max_num_seqs
        width = 1 + max((row.num_drafts for row in plan.decode), default=0)
        widths = self.config.buckets.verify_widths
        assert bucket.verify_width == min(w for w in widths if w >= width)
        assert bucket.num_drafts == (self.choice if emitting_rows(plan) else 0)
        assert bucket.guided == any(self.holder(r.slot).is_guided for r in emitting_rows(plan))
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
        self, chunk: TokenChunk, client: Client, row: Row, run: tuple[int, ...], verified: int
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
            client.draft_tokens += verified
            client.verified_output += len(kept)
            self.verify_steps += 1
            self.draft_tokens += verified
            self.accepted_at.update(range(len(kept) - 1))
        stats = chunk.speculation
        assert stats.verify_steps == client.verify_steps
        assert stats.draft_tokens == client.draft_tokens
        assert chunk.cached_tokens == (client.cached if first == 0 else 0)
        assert stats.emitted_tokens == client.verified_output
        assert stats.accepted_tokens == stats.emitted_tokens - stats.verify_steps
        assert stats.accepted_tokens <= stats.draft_tokens
        if chunk.finish_reason is not None:
            self.finished[chunk.finish_reason] += 1

    def check(self) -> None:
        """What holds between any two calls."""
        self.leave()
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
        assert stats.preemptions == self.preemptions
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (self.queries, self.hits)
        # A stop that is read late costs one row at most, a limit is known before.
        for client in self.clients:
            late = client.reason == "stop" and not client.is_guided
            assert client.aborted or client.wasted_rows <= late
        scheduler.pool.check()
        assert scheduler.pool.num_free == self.num_free
        assert scheduler.has_drafter == self.has_drafter
        assert stats.drafter_losses == self.drafter_losses
        injects = self.config.drafter is not None and self.config.enable_prefix_caching
        for client in self.live:
            # Exactly the full pages of positions known to be fed, and none without a drafter.
            full = client.fed // self.config.block_size if injects else 0
            for index, page in enumerate(client.pages):
                if client.has_context:
                    assert scheduler.pool.drafter_valid(page) == (index < full)
        if self.has_drafter <= self.device.has_drafter:
            valid = filter(scheduler.pool.drafter_valid, range(self.config.num_kv_pages))
            assert all(map(self.device.knows, valid)), "a page that the drafter does not know"
