import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import EngineConfig
from actors.errors import RequestRejected
from actors.limits import check_request
from actors.messages import (
    DecodeRow,
    GenerateRequest,
    PrefillRow,
    StepOutput,
    StepPlan,
    TokenChunk,
)
from actors.scheduler import Scheduler
from tests.unit.actors.builders import EOS, VOCAB, engine_config, generate_request

STOP = 2
# A slot, what it emitted, how many drafts it verified: -1 for the token that prefill gives.
Emitting = tuple[int, tuple[int, ...], int]


@dataclass(eq=False)
class Expected:
    """What a client should see of one request, and what the device holds for it."""

    message: GenerateRequest
    max_len: int
    stops: frozenset[int]
    output: list[int] = field(default_factory=list)
    fed: int = 0
    drafts: int = 0
    table: tuple[int, ...] = ()
    verify_steps: int = 0
    draft_tokens: int = 0
    verified_output: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.message.prompt_token_ids

    @property
    def left(self) -> int:
        return self.max_len - len(self.prompt) - len(self.output)

    @property
    def decodes(self) -> bool:
        return self.fed >= len(self.prompt)

    def cut(self, run: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        for i, token in enumerate(run):
            if token in self.stops:
                return run[: i + 1], "stop"
            if i + 1 == self.left:
                return run[: i + 1], "length"
        return run, None


class Simulation:
    """A scheduler, a device that accepts random drafts, and what has to be true of both."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.waiting: list[Expected] = []
        self.running: dict[int, Expected] = {}
        self.ended: list[str] = []
        self.finished: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.emitted = self.verify_steps = self.draft_tokens = self.prompt_tokens = 0

    def add(self, message: GenerateRequest) -> None:
        check_request(self.config, message)
        self.scheduler.add(message)
        sampling = message.sampling
        self.waiting.append(
            Expected(
                message=message,
                max_len=min(
                    self.config.max_model_len,
                    len(message.prompt_token_ids) + sampling.max_tokens,
                ),
                stops=frozenset(
                    {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
                ),
            )
        )
        self.prompt_tokens += len(message.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        if request_id not in self.ended:
            self.finished["abort"] += 1
            self.ended.append(request_id)
        self.waiting = [r for r in self.waiting if r.message.request_id != request_id]
        self.running = {
            slot: r for slot, r in self.running.items() if r.message.request_id != request_id
        }

    def step(self, rng: random.Random, acceptance: float) -> list[TokenChunk]:
        plan = self.scheduler.schedule()
        self.admit(plan)
        self.check_budget(plan)
        self.check_pages(plan)
        if plan.bucket is None:
            assert not self.running
            return []
        emitting = self.feed_decode(plan, rng, acceptance) + self.feed_prefill(plan, rng)
        output = StepOutput(
            step=plan.step,
            sampled=tuple(run for _, run, _ in emitting),
            num_drafts=tuple(max(verified, 0) for _, _, verified in emitting),
        )
        chunks = self.scheduler.update(plan, output)
        assert len(chunks) == len(emitting)
        for chunk, (slot, run, verified) in zip(chunks, emitting, strict=True):
            self.check_chunk(chunk, slot, run, verified)
        self.check_stats()
        self.check_drafter_valid()
        self.scheduler.pool.check()
        assert self.scheduler.has_work == bool(self.running or self.waiting)
        return chunks

    def admit(self, plan: StepPlan) -> None:
        """Oldest first, and nobody waits while a slot and the pages are free."""
        for update in plan.page_updates:
            assert update.slot not in self.running
            assert 0 <= update.slot < self.config.num_slots
            assert update.first == 0
            assert self.waiting, "a slot was given to nobody"
            request = self.waiting.pop(0)
            request.table = update.pages
            self.running[update.slot] = request
        if self.waiting and len(self.running) < self.config.num_slots:
            held = sum(len(r.table) for r in self.running.values())
            free = self.config.num_kv_pages - 1 - held
            assert free < -(-self.waiting[0].max_len // self.config.block_size)

    def check_budget(self, plan: StepPlan) -> None:
        """Every decoding request is in the step; prefill gets all of the rest, oldest first."""
        decoding = sorted(slot for slot, r in self.running.items() if r.decodes)
        assert sorted(row.slot for row in plan.decode) == decoding
        left = self.config.max_num_batched_tokens - len(decoding) * (self.config.num_drafts + 1)
        assert left >= 0
        chunks: Counter[int] = Counter()
        for row in plan.prefill:
            assert row.token_ids
            chunks[row.slot] += len(row.token_ids)
        for slot, request in self.running.items():  # in order of admission
            wanted = min(left, len(request.prompt) - request.fed) if not request.decodes else 0
            assert chunks[slot] == wanted
            left -= wanted
        assert set(chunks) <= set(self.running)

    def check_pages(self, plan: StepPlan) -> None:
        pages = [page for r in self.running.values() for page in r.table]
        assert len(pages) == len(set(pages))
        assert all(0 < page < self.config.num_kv_pages for page in pages)
        bucket = plan.bucket
        assert (bucket is None) == (not plan.decode and not plan.prefill)
        if bucket is None:
            return
        assert len(plan.decode) <= bucket.decode_rows <= self.config.max_num_seqs
        assert bucket.verify_width == self.config.num_drafts + 1
        assert len(plan.prefill) <= bucket.prefill_rows
        assert all(len(row.token_ids) <= bucket.prefill_width for row in plan.prefill)
        ends = [(row.slot, row.position + row.num_drafts + 1) for row in plan.decode]
        ends += [(row.slot, row.start + len(row.token_ids)) for row in plan.prefill]
        for slot, end in ends:
            size = self.config.block_size
            assert end <= len(self.running[slot].table) * size
            assert end <= bucket.context_pages * size
            # The last token of a request is emitted and never fed.
            assert end < self.running[slot].max_len <= self.config.max_model_len
        assert bucket.context_pages <= self.config.pages_per_request

    def feed_decode(self, plan: StepPlan, rng: random.Random, acceptance: float) -> list[Emitting]:
        emitting: list[Emitting] = []
        for row in plan.decode:
            request = self.running[row.slot]
            assert row.position == request.fed
            assert not row.prev_in_flight
            # Speculation is never off where a draft could still be emitted.
            verified = min(row.num_drafts, request.drafts)
            assert verified == row.num_drafts == min(self.config.num_drafts, request.left - 1)
            accepted = 0
            while accepted < verified and rng.random() < acceptance:
                accepted += 1
            run = tuple(rng.randrange(VOCAB // 2) for _ in range(accepted + 1))
            request.fed += len(run)
            request.drafts = self.config.num_drafts if row.propose else 0
            self.check_sampling(row, request)
            emitting.append((row.slot, run, verified))
        return emitting

    def feed_prefill(self, plan: StepPlan, rng: random.Random) -> list[Emitting]:
        emitting: list[Emitting] = []
        for row in plan.prefill:
            request = self.running[row.slot]
            end = row.start + len(row.token_ids)
            assert row.start == request.fed
            assert row.token_ids == request.prompt[row.start : end]
            assert row.fresh == (row.start == 0)
            assert row.last == (end == len(request.prompt))
            request.fed = end
            self.check_sampling(row, request)
            if row.last:
                request.drafts = self.config.num_drafts if row.propose else 0
                emitting.append((row.slot, (rng.randrange(VOCAB // 2),), -1))
        return emitting

    def check_sampling(self, row: DecodeRow | PrefillRow, request: Expected) -> None:
        assert row.seed == request.message.sampling.seed
        assert row.temperature == request.message.sampling.temperature
        # Behind this step's token and the next one's, a draft must have room.
        assert not row.propose or (self.config.num_drafts > 0 and request.left > 2)

    def check_chunk(
        self, chunk: TokenChunk, slot: int, run: tuple[int, ...], verified: int
    ) -> None:
        request = self.running[slot]
        kept, reason = request.cut(run)
        assert chunk.request_id == request.message.request_id
        assert chunk.first_index == len(request.output)
        assert (chunk.token_ids, chunk.finish_reason) == (kept, reason)
        request.output += kept
        self.emitted += len(kept)
        if verified >= 0:
            request.verify_steps += 1
            request.draft_tokens += verified
            request.verified_output += len(kept)
            self.verify_steps += 1
            self.draft_tokens += verified
            self.accepted_at.update(range(len(kept) - 1))
        stats = chunk.speculation
        assert stats.verify_steps == request.verify_steps
        assert stats.draft_tokens == request.draft_tokens
        assert stats.emitted_tokens == request.verified_output == len(request.output) - 1
        assert stats.accepted_tokens == stats.emitted_tokens - stats.verify_steps
        assert stats.accepted_tokens <= stats.draft_tokens
        if reason is None:
            return
        self.finished[reason] += 1
        self.ended.append(chunk.request_id)
        del self.running[slot]

    def check_drafter_valid(self) -> None:
        """Exactly the full pages of fed positions, and none without a drafter."""
        for request in self.running.values():
            full = request.fed // self.config.block_size if self.config.drafter else 0
            for index, page in enumerate(request.table):
                assert self.scheduler.pool.drafter_valid(page) == (index < full)

    def check_stats(self) -> None:
        stats = self.scheduler.stats
        assert stats.requests == self.finished
        assert stats.prompt_tokens == self.prompt_tokens
        assert stats.output_tokens == self.emitted
        assert stats.verify_steps == self.verify_steps
        assert stats.draft_tokens == self.draft_tokens
        assert stats.accepted_at == self.accepted_at
        assert stats.accepted_tokens == self.accepted_at.total()

    def drain(self, rng: random.Random, acceptance: float) -> list[TokenChunk]:
        chunks = []
        # Every step feeds at least one token of the oldest request.
        most = sum(r.max_len for r in (*self.waiting, *self.running.values()))
        while self.scheduler.has_work:
            most -= 1
            assert most >= 0, "a request does not progress"
            chunks += self.step(rng, acceptance)
        self.scheduler.check_idle()
        assert not self.waiting
        assert not self.running
        return chunks


@dataclass(frozen=True)
class Arrive:
    request: GenerateRequest


@dataclass(frozen=True)
class Abort:
    request: int


@dataclass(frozen=True)
class Step:
    seed: int
    acceptance: float


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[EngineConfig, list[Arrive | Abort | Step]]:
    num_drafts = draw(st.integers(0, 4))
    seqs = draw(st.integers(1, 4))
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 60))
    per_request = -(-max_model_len // block_size)
    config = engine_config(
        num_drafts=num_drafts,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(16, seqs * (num_drafts + 1)) + draw(st.integers(0, 10)),
        block_size=block_size,
        num_kv_pages=draw(st.integers(per_request + 1, seqs * per_request + 1)),
    )
    kinds = draw(st.lists(st.sampled_from(["arrive", "abort", "step", "step"]), max_size=40))
    operations: list[Arrive | Abort | Step] = []
    arrived = 0
    for kind in kinds:
        if kind == "arrive":
            # Whose token it is can be told by its value: no two requests feed the same prompt.
            length = draw(st.integers(1, max_model_len - 1))
            prompt = tuple((arrived * 7 + i * i) % VOCAB for i in range(length))
            request = generate_request(
                f"r{arrived}",
                prompt,
                max_tokens=draw(st.integers(1, 30)),
                seed=arrived,
                stop_token_ids=draw(st.sampled_from([(), (STOP,)])),
                ignore_eos=draw(st.booleans()),
            )
            operations.append(Arrive(request))
            arrived += 1
        elif kind == "step":
            acceptance = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
            operations.append(Step(draw(st.integers(0, 1000)), acceptance))
        elif arrived:
            operations.append(Abort(draw(st.integers(0, arrived - 1))))
    return config, operations


@settings(max_examples=250, deadline=None)
@given(scenarios(), st.integers(0, 1000))
def test_any_traffic_keeps_the_invariants(
    scenario: tuple[EngineConfig, list[Arrive | Abort | Step]], seed: int
) -> None:
    config, operations = scenario
    simulation = Simulation(config)
    for operation in operations:
        match operation:
            case Arrive(request):
                simulation.add(request)
            case Abort(index):
                simulation.abort(f"r{index}")
            case Step(step_seed, acceptance):
                simulation.step(random.Random(step_seed), acceptance)
    simulation.drain(random.Random(seed), 0.7)


def answer(plan: StepPlan, *runs: tuple[int, ...]) -> StepOutput:
    """The device's answer to `plan`, with every planned draft verified."""
    num_drafts = [row.num_drafts for row in plan.decode]
    num_drafts += [0 for row in plan.prefill if row.last]
    return StepOutput(step=plan.step, sampled=runs, num_drafts=tuple(num_drafts))


def advance(scheduler: Scheduler, *runs: tuple[int, ...]) -> list[TokenChunk]:
    plan = scheduler.schedule()
    return scheduler.update(plan, answer(plan, *runs))


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(engine_config())
    assert not scheduler.has_work
    plan = scheduler.schedule()
    assert (plan.bucket, plan.decode, plan.prefill, plan.page_updates) == (None, (), (), ())
    scheduler.check_idle()


def test_step_numbers_count_up() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request(max_tokens=9))
    first = scheduler.schedule()
    scheduler.update(first, answer(first, (10,)))
    assert scheduler.schedule().step == first.step + 1


def test_a_long_prompt_never_starves_a_stream() -> None:
    config = engine_config(num_drafts=3, max_model_len=400, max_num_batched_tokens=20)
    scheduler = Scheduler(config)
    scheduler.add(generate_request("stream", max_tokens=100))
    advance(scheduler, (10,))
    scheduler.add(generate_request("long", 300, max_tokens=1))
    fed = 0
    while fed < 300:
        plan = scheduler.schedule()
        assert [row.slot for row in plan.decode] == [0]
        fed += sum(len(row.token_ids) for row in plan.prefill)
        runs = [(10,)] * (1 + (fed == 300))
        scheduler.update(plan, answer(plan, *runs))
    # The budget less the verified row is what a chunk may have: 300 tokens take 19 steps of 16.
    assert scheduler.stats.verify_steps == 19


def test_a_request_that_waits_for_pages_keeps_its_turn() -> None:
    config = engine_config(max_model_len=16, block_size=4, num_kv_pages=7)
    scheduler = Scheduler(config)
    for name, prompt in (("first", 9), ("large", 15), ("small", 1)):
        scheduler.add(generate_request(name, prompt, max_tokens=3))
    plan = scheduler.schedule()
    assert [len(row.token_ids) for row in plan.prefill] == [9]
    scheduler.abort("first")
    assert [len(row.token_ids) for row in scheduler.schedule().prefill] == [15, 1]


@pytest.mark.parametrize("num_drafts", [0, 1, 9])
def test_a_prompt_one_short_of_the_limit_gives_one_token(num_drafts: int) -> None:
    simulation = Simulation(engine_config(num_drafts=num_drafts, max_num_batched_tokens=64))
    simulation.add(generate_request("a", 63, max_tokens=50, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), 1.0)
    assert [(len(c.token_ids), c.finish_reason) for c in chunks] == [(1, "length")]


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_at_or_over_the_limit_is_refused(length: int) -> None:
    with pytest.raises(RequestRejected, match=f"{length} tokens, the limit is 63") as caught:
        check_request(engine_config(max_model_len=64), generate_request("a", length))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("short", range(1, 12))
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_the_end_of_the_context_is_reached_exactly(short: int, acceptance: float) -> None:
    simulation = Simulation(engine_config(num_drafts=9, max_num_batched_tokens=64))
    simulation.add(generate_request("a", 64 - short, max_tokens=100, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), acceptance)
    assert sum(len(chunk.token_ids) for chunk in chunks) == short
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_mixed_max_tokens_in_one_batch(acceptance: float) -> None:
    k = 5
    simulation = Simulation(engine_config(num_drafts=k, max_num_seqs=5))
    limits = [1, 2, k, k + 1, k + 2]
    for limit in limits:
        simulation.add(generate_request(f"r{limit}", max_tokens=limit, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), acceptance)
    lengths: Counter[str] = Counter()
    for chunk in chunks:
        lengths[chunk.request_id] += len(chunk.token_ids)
    assert lengths == {f"r{limit}": limit for limit in limits}
    assert simulation.scheduler.stats.requests == {"length": 5}


@pytest.mark.parametrize("offset", range(4))
def test_counters_end_at_a_stop_inside_an_accepted_run(offset: int) -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request(max_tokens=20))
    advance(scheduler, (10,))
    run = tuple(EOS if i == offset else 20 + i for i in range(4))
    (chunk,) = advance(scheduler, run)
    assert chunk.token_ids == run[: offset + 1]
    assert chunk.finish_reason == "stop"
    assert chunk.speculation is not None
    assert chunk.speculation.emitted_tokens == offset + 1
    assert chunk.speculation.accepted_tokens == offset
    assert scheduler.stats.output_tokens == 1 + offset + 1
    assert scheduler.stats.accepted_at == Counter(range(offset))
    scheduler.check_idle()


def test_ignore_eos_and_extra_stop_tokens() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request(max_tokens=20, ignore_eos=True, stop_token_ids=(STOP,)))
    advance(scheduler, (EOS,))
    (chunk,) = advance(scheduler, (EOS, 9, STOP, 9))
    assert (chunk.token_ids, chunk.finish_reason) == ((EOS, 9, STOP), "stop")


def test_a_stop_as_the_first_token_ends_without_a_verify_step() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request(max_tokens=20))
    (chunk,) = advance(scheduler, (EOS,))
    assert (chunk.token_ids, chunk.finish_reason) == ((EOS,), "stop")
    assert chunk.speculation is not None
    assert chunk.speculation.mean_acceptance_length is None
    scheduler.check_idle()


def test_stop_tokens_in_the_prompt_end_nothing() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request(prompt=(EOS, EOS, EOS), max_tokens=2))
    (chunk,) = advance(scheduler, (10,))
    assert chunk.finish_reason is None


def test_a_slot_is_reset_for_its_next_request() -> None:
    scheduler = Scheduler(engine_config(max_num_seqs=1))
    scheduler.add(generate_request("a", max_tokens=1))
    advance(scheduler, (10,))
    scheduler.add(generate_request("b", (7, 8), max_tokens=1))
    (row,) = scheduler.schedule().prefill
    assert (row.slot, row.start, row.fresh, row.token_ids) == (0, 0, True, (7, 8))


def test_an_id_can_be_used_again_after_its_end() -> None:
    scheduler = Scheduler(engine_config())
    for _ in range(2):
        scheduler.add(generate_request("a", max_tokens=1))
        (chunk,) = advance(scheduler, (10,))
        assert chunk.first_index == 0
    scheduler.add(generate_request("a", max_tokens=1))
    scheduler.abort("a")
    scheduler.abort("a")
    scheduler.check_idle()
    assert scheduler.stats.requests == {"length": 2, "abort": 1}


def test_the_output_of_another_step_is_our_bug() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request())
    plan = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.update(plan, StepOutput(step=plan.step + 1, sampled=((1,),), num_drafts=(0,)))


def test_check_idle_finds_what_is_held() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request())
    with pytest.raises(AssertionError):
        scheduler.check_idle()


@pytest.mark.parametrize(
    ("request_", "param", "named"),
    [
        (generate_request(prompt=()), "prompt", ["no tokens"]),
        (generate_request(prompt=(3, VOCAB)), "prompt", [str(VOCAB), "vocabulary"]),
        (generate_request(prompt=(3, -1)), "prompt", ["-1", str(VOCAB)]),
        (generate_request(max_tokens=0), "max_tokens", ["max_tokens is 0", "1"]),
        (generate_request(max_tokens=-5), "max_tokens", ["max_tokens is -5", "1"]),
        (generate_request(temperature=0.7), "temperature", ["0.7", "0"]),
        (generate_request(temperature=1e-6), "temperature", ["1e-06", "0"]),
        (generate_request(temperature=float("nan")), "temperature", ["nan", "0"]),
        (generate_request(seed=2**64), "seed", [str(2**64)]),
        (generate_request(seed=-(2**63) - 1), "seed", [str(-(2**63) - 1)]),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(
    request_: GenerateRequest, param: str, named: list[str]
) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_request(engine_config(), request_)
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token_id", [0, VOCAB - 1])
def test_the_whole_vocabulary_is_served(token_id: int) -> None:
    check_request(engine_config(), generate_request(prompt=(token_id,)))
