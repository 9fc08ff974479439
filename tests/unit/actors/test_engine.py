import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actors.engine import Engine
from actors.errors import EngineDead, RequestRejected, ShardsLost
from actors.messages import StepOutput, StepPlan, TokenChunk, decode_plan, encode
from actors.trace import Trace
from tests.unit.actors.builders import EOS, engine_config, generate_request

WAIT_S = 10.0
Answer = Callable[[StepPlan], StepOutput | None]
Maker = Callable[..., tuple[Engine, "FakeShards", "Delivered"]]


def one_token_each(plan: StepPlan) -> StepOutput:
    emitting = len(plan.decode) + sum(row.last for row in plan.prefill)
    drafts = [row.num_drafts for row in plan.decode]
    return StepOutput(
        step=plan.step,
        sampled=((10,),) * emitting,
        num_drafts=(*drafts, *[0] * (emitting - len(drafts))),
    )


def all_accepted(plan: StepPlan) -> StepOutput:
    runs = [(10,) * (row.num_drafts + 1) for row in plan.decode]
    last = [(10,) for row in plan.prefill if row.last]
    drafts = [row.num_drafts for row in plan.decode] + [0] * len(last)
    return StepOutput(step=plan.step, sampled=(*runs, *last), num_drafts=tuple(drafts))


class FakeShards:
    """Holds the engine to the protocol: without `ahead`, every plan is drained before the next."""

    def __init__(self, answer: Answer = one_token_each, ahead: bool = True) -> None:
        self.answer = answer
        self.ahead = ahead
        self.plans: list[StepPlan] = []
        self.times_closed = 0
        self.threads: set[int] = set()
        self.in_flight: StepPlan | None = None
        self.may_drain_nothing = False
        self.sealed_after: list[int] = []

    def step(self, payload: bytes) -> bytes:
        assert not self.times_closed, "a step after the end"
        self.threads.add(threading.get_ident())
        plan = decode_plan(payload)
        previous, self.in_flight = self.in_flight, plan if plan.bucket else None
        if plan.bucket is None:
            assert previous is not None or self.may_drain_nothing, "nothing was left to drain"
            assert (plan.decode, plan.prefill, plan.page_updates) == ((), (), ())
        else:
            assert previous is None or self.ahead, "a plan before the last one was drained"
            self.plans.append(plan)
        return encode(None if previous is None else self.answer(previous))

    def seal(self) -> None:
        assert self.in_flight is None, "sealed before the last step was read"
        self.sealed_after.append(len(self.plans))

    def close(self) -> None:
        self.times_closed += 1


class Delivered:
    """Everything an engine delivered, and a way to wait for it."""

    def __init__(self) -> None:
        self.calls: list[list[TokenChunk]] = []
        self._arrived = threading.Condition()

    def __call__(self, chunks: list[TokenChunk]) -> None:
        with self._arrived:
            self.calls.append(chunks)
            self._arrived.notify_all()

    @property
    def chunks(self) -> list[TokenChunk]:
        return [chunk for call in self.calls for chunk in call]

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for c in self.chunks if c.request_id == request_id for t in c.token_ids)

    def reason(self, request_id: str) -> str | None:
        return next((c.finish_reason for c in self.chunks if c.request_id == request_id), None)

    def wait_for(self, done: Callable[[], bool]) -> None:
        with self._arrived:
            assert self._arrived.wait_for(done, WAIT_S)

    def wait_for_end(self, request_id: str) -> None:
        self.wait_for(
            lambda: any(c.request_id == request_id and c.finish_reason for c in self.chunks)
        )


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether a step is submitted before the one in front of it was read."""
    value: bool = request.param
    return value


@pytest.fixture
def make_engine(ahead: bool) -> Maker:
    def make(
        answer: Answer = one_token_each, *, trace: Trace | None = None, **changes: Any
    ) -> tuple[Engine, FakeShards, Delivered]:
        shards, delivered = FakeShards(answer, ahead), Delivered()
        config = engine_config(async_scheduling=ahead, **changes)
        return Engine(config, shards, delivered, trace=trace), shards, delivered

    return make


def step_to_the_end(engine: Engine) -> None:
    while engine.step():
        pass


@contextmanager
def running(engine: Engine) -> Iterator[threading.Thread]:
    """`engine.run` on a thread of its own; what it raised is raised here."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            engine.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        engine.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_without_work_the_shards_are_left_alone(make_engine: Maker) -> None:
    engine, shards, delivered = make_engine()
    assert not engine.step()
    assert (shards.plans, delivered.calls) == ([], [])


def test_a_request_is_stepped_to_its_end(make_engine: Maker, ahead: bool) -> None:
    engine, shards, delivered = make_engine(all_accepted)
    engine.add(generate_request("a", 5, max_tokens=6))
    assert engine.step()
    assert len(delivered.chunks) == (0 if ahead else 1)
    assert [engine.step() for _ in range(2 + ahead)] == [True] * (1 + ahead) + [False]
    assert [c.first_index for c in delivered.chunks] == [0, 1, 5]
    assert [len(c.token_ids) for c in delivered.chunks] == [1, 4, 1]
    assert [c.finish_reason for c in delivered.chunks] == [None, None, "length"]
    assert [plan.step for plan in shards.plans] == [1, 2, 3]


def test_a_step_delivers_one_chunk_per_request_in_one_call(make_engine: Maker) -> None:
    engine, _, delivered = make_engine()
    engine.add_all([generate_request("a"), generate_request("b")])
    while not delivered.calls:
        engine.step()
    assert [[c.request_id for c in call] for call in delivered.calls] == [["a", "b"]]


def test_a_step_that_emits_nothing_delivers_nothing_for_anyone(make_engine: Maker) -> None:
    engine, _, delivered = make_engine(max_num_batched_tokens=16)
    engine.add(generate_request("a", 40, max_tokens=1))
    step_to_the_end(engine)
    assert [len(call) for call in delivered.calls] == [0, 0, 1]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_rejected_request_leaves_none_queued(make_engine: Maker, bad: int) -> None:
    engine, shards, _ = make_engine()
    requests = [generate_request(name, 1000 if i == bad else 5) for i, name in enumerate("abc")]
    with pytest.raises(RequestRejected):
        engine.add_all(requests)
    assert not engine.step()
    assert shards.plans == []
    engine.scheduler.check_idle()


def test_a_rejected_request_is_not_queued(make_engine: Maker) -> None:
    engine, shards, _ = make_engine()
    with pytest.raises(RequestRejected):
        engine.add(generate_request(max_tokens=0))
    assert not engine.step()
    assert shards.plans == []


def test_a_seed_no_plan_can_carry_does_not_end_the_engine(make_engine: Maker) -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("good"))
    with suppress(RequestRejected):
        engine.add(generate_request("bad", seed=2**64))
    step_to_the_end(engine)
    assert len(delivered.tokens("good")) == 4


def test_an_abort_in_the_same_breath_runs_nothing(make_engine: Maker) -> None:
    engine, shards, _ = make_engine()
    engine.add(generate_request("a"))
    engine.abort("a")
    assert not engine.step()
    assert shards.plans == []
    engine.scheduler.check_idle()


def test_an_abort_while_queued(make_engine: Maker) -> None:
    engine, _, delivered = make_engine(max_num_seqs=1)
    engine.add_all([generate_request("a"), generate_request("b")])
    engine.step()
    engine.abort("b")
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 4
    assert delivered.tokens("b") == ()
    engine.scheduler.check_idle()


def test_an_abort_in_mid_stream_frees_everything(make_engine: Maker) -> None:
    engine, _, delivered = make_engine()
    engine.add_all([generate_request("a", max_tokens=20), generate_request("b", max_tokens=6)])
    while not delivered.tokens("a"):
        engine.step()
    engine.abort("a")
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 1
    assert len(delivered.tokens("b")) == 6
    engine.scheduler.check_idle()


def test_an_abort_during_a_step_takes_effect_after_it(make_engine: Maker) -> None:
    def abort_inside(plan: StepPlan) -> StepOutput:
        engine.abort("a")
        return one_token_each(plan)

    engine, _, delivered = make_engine(abort_inside)
    engine.add(generate_request("a", max_tokens=20))
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 1
    engine.scheduler.check_idle()


def test_an_abort_after_the_end_or_of_a_stranger_is_ignored(make_engine: Maker) -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("a", max_tokens=1))
    step_to_the_end(engine)
    engine.abort("a")
    engine.abort("nobody")
    engine.add(generate_request("b", max_tokens=1))
    step_to_the_end(engine)
    assert delivered.reason("b") == "length"
    assert engine.scheduler.stats.requests == {"length": 2}


def test_an_id_can_be_used_again_right_after_its_abort(make_engine: Maker) -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("a", max_tokens=20))
    while not delivered.chunks:
        engine.step()
    engine.abort("a")
    engine.add(generate_request("a", max_tokens=1))
    step_to_the_end(engine)
    assert [c.first_index for c in delivered.chunks] == [0, 0]


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_failed_shard_ends_the_engine(make_engine: Maker, ahead: bool, failing_call: int) -> None:
    engine, shards, delivered = make_engine()
    healthy, calls = shards.step, 0

    def step(payload: bytes) -> bytes:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise RuntimeError("rank 1 is gone")
        return healthy(payload)

    shards.step = step  # type: ignore[method-assign]
    engine.add(generate_request("a"))
    with pytest.raises(EngineDead) as caught:
        step_to_the_end(engine)
    assert str(caught.value.__cause__) == "rank 1 is gone"
    assert shards.times_closed == 1
    assert calls == failing_call
    # What was emitted in the steps before has reached the client.
    num_read = failing_call - 2 if ahead else (failing_call - 1) // 2
    assert len(delivered.tokens("a")) == max(0, num_read)


def nothing(plan: StepPlan) -> None:
    return None


def output_of_another_step(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step + 1, sampled=((10,),), num_drafts=(0,))


def row_missing(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step)


def row_empty(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step, sampled=((),), num_drafts=(0,))


@pytest.mark.parametrize("answer", [nothing, output_of_another_step, row_missing, row_empty])
def test_an_output_that_does_not_fit_its_plan_ends_the_engine(
    make_engine: Maker, answer: Answer
) -> None:
    engine, shards, _ = make_engine(answer)
    engine.add(generate_request())
    with pytest.raises(EngineDead):
        step_to_the_end(engine)
    assert shards.times_closed == 1


def test_run_ends_with_engine_dead(make_engine: Maker) -> None:
    def fail(plan: StepPlan) -> StepOutput:
        raise RuntimeError("out of memory")

    engine, shards, _ = make_engine(fail)
    engine.add(generate_request())
    with pytest.raises(EngineDead), running(engine) as thread:
        thread.join(WAIT_S)
    assert shards.times_closed == 1


def test_run_wakes_on_add_and_stops_on_stop(make_engine: Maker) -> None:
    engine, shards, delivered = make_engine()
    with running(engine) as thread:
        for name in ("a", "b"):
            engine.add(generate_request(name))
            delivered.wait_for_end(name)
        assert thread.is_alive()
        assert shards.threads == {thread.ident}
    assert [len(delivered.tokens(name)) for name in ("a", "b")] == [4, 4]
    engine.scheduler.check_idle()


def test_run_serves_many_threads_at_once(make_engine: Maker) -> None:
    engine, _, delivered = make_engine(all_accepted)
    names = [f"r{i}" for i in range(24)]

    def client(mine: list[str]) -> None:
        for name in mine:
            engine.add(generate_request(name, max_tokens=7))

    with running(engine):
        clients = [threading.Thread(target=client, args=(names[i::4],)) for i in range(4)]
        for thread in clients:
            thread.start()
        for name in names:
            delivered.wait_for_end(name)
        for thread in clients:
            thread.join(WAIT_S)
    assert all(len(delivered.tokens(name)) == 7 for name in names)
    engine.scheduler.check_idle()


def test_run_sleeps_while_idle(make_engine: Maker) -> None:
    engine, shards, delivered = make_engine()
    with running(engine) as thread:
        engine.add(generate_request("a"))
        delivered.wait_for_end("a")
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        time.sleep(0.05)
        before, steps = time.clock_gettime(clock), len(shards.plans)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.02
        assert len(shards.plans) == steps


def test_an_abort_wakes_run_and_ends_a_stream(make_engine: Maker) -> None:
    aborted = threading.Event()

    def slowly(plan: StepPlan) -> StepOutput:
        aborted.wait(0.001)
        return one_token_each(plan)

    engine, _, delivered = make_engine(slowly, max_model_len=4000)
    with running(engine):
        engine.add(generate_request("a", max_tokens=3900))
        delivered.wait_for(lambda: len(delivered.calls) >= 3)
        engine.abort("a")
        aborted.set()
        engine.add(generate_request("b", max_tokens=1))
        delivered.wait_for_end("b")
    assert len(delivered.tokens("a")) < 3900
    engine.scheduler.check_idle()


def test_stop_ends_run_with_work_left(make_engine: Maker) -> None:
    engine, _, delivered = make_engine(max_model_len=4000)
    with running(engine):
        engine.add(generate_request("a", max_tokens=3900))
        delivered.wait_for(lambda: len(delivered.calls) >= 3)
    assert engine.scheduler.has_work
    assert len(delivered.tokens("a")) < 3900


def test_stop_before_run_returns_at_once(make_engine: Maker) -> None:
    engine, shards, _ = make_engine()
    engine.add(generate_request())
    engine.stop()
    engine.run()
    assert shards.plans == []


# ------------------------------------------------------------------------------ running ahead


def test_a_step_is_submitted_before_or_after_the_one_in_front_was_read(
    make_engine: Maker, ahead: bool
) -> None:
    trace = Trace()
    engine, shards, _ = make_engine(trace=trace, num_drafts=0)
    engine.add_all([generate_request(name, max_tokens=12) for name in ("a", "b")])
    step_to_the_end(engine)
    when = {(span.name, span.args.get("step")): span.start_s for span in trace.spans}
    steps = [plan.step for plan in shards.plans]
    assert {("submit", step) for step in steps} | {("read", step) for step in steps} <= set(when)
    early = {when["submit", after] < when["read", step] for step, after in pairwise(steps)}
    assert early == {ahead}
    assert all(when["schedule", step] < when["submit", step] < when["read", step] for step in steps)


def test_an_engine_that_runs_ahead_never_waits_for_a_step_it_could_plan(
    make_engine: Maker, ahead: bool
) -> None:
    """Without speculation nothing is uncertain, so the device always has the next step."""
    engine, shards, delivered = make_engine(num_drafts=0)
    engine.add(generate_request("a", max_tokens=20))
    drained = 0
    while engine.step():
        drained += shards.in_flight is None
    assert len(shards.plans) == 20
    assert drained == (0 if ahead else 19)
    assert len(delivered.tokens("a")) == 20


def test_a_finish_is_delivered_before_the_wasted_step_is_read(make_engine: Maker) -> None:
    eos = StepOutput(step=1, sampled=((EOS,),), num_drafts=(0,))
    engine, shards, delivered = make_engine(
        lambda plan: eos if plan.prefill else one_token_each(plan)
    )
    engine.add(generate_request("a", max_tokens=20))
    while not delivered.calls:
        more = engine.step()
    assert delivered.reason("a") == "stop"
    assert more == (len(shards.plans) == 2) == engine.scheduler.has_work
    step_to_the_end(engine)
    assert len(delivered.chunks) == 1
    assert len(shards.plans) == (2 if more else 1)


def test_rows_left_out_change_no_stream(ahead: bool) -> None:
    asked = 0

    def every_other(ids: Sequence[str]) -> str | None:
        nonlocal asked
        asked += 1
        return ids[0] if asked % 2 else None

    shards, delivered = FakeShards(all_accepted, ahead), Delivered()
    engine = Engine(engine_config(async_scheduling=ahead), shards, delivered, leave_out=every_other)
    engine.add_all([generate_request(name, max_tokens=9) for name in ("a", "b", "c")])
    step_to_the_end(engine)
    assert [len(delivered.tokens(name)) for name in ("a", "b", "c")] == [9, 9, 9]
    assert asked >= len(shards.plans)
    assert [len(plan.rows) for plan in shards.plans[:2]] == [2, 3]


def test_an_adaptive_engine_times_every_choice_behind_warm_up() -> None:
    shards = FakeShards()
    config = engine_config(num_drafts=3, verify_widths=(1, 4), adaptive_drafts=True)
    engine = Engine(config, shards, deliver=lambda chunks: None)
    engine.warm_up()
    ladder = engine.scheduler.ladder
    warmed = len(ladder.warm_up())
    timed = [ladder.decode_step(rows, drafts) for rows in ladder.decode_rows for drafts in (0, 3)]
    assert shards.sealed_after == [warmed], "compiling is not timed"
    assert [plan.bucket for plan in shards.plans[warmed:]] == [
        bucket for bucket in timed for _ in range(3)
    ]
    for rows in ladder.decode_rows:
        times_s = engine.scheduler.speculation._sizes[rows].times_s
        assert sorted(times_s) == [0, 3]
        assert all(0 < seconds < 1 for seconds in times_s.values())


def test_an_engine_that_may_overlap_times_halves_too() -> None:
    shards = FakeShards()
    config = engine_config(
        num_drafts=3, verify_widths=(1, 4), adaptive_drafts=True, overlap="auto", max_num_seqs=4
    )
    engine = Engine(config, shards, deliver=lambda chunks: None)
    engine.warm_up()
    ladder = engine.scheduler.ladder
    deferred = [plan.bucket for plan in shards.plans if plan.defers_drafts]
    assert deferred == [ladder.decode_step(half, 3) for half in (1, 2) for _ in range(4)]


def test_warm_up_leaves_nothing_in_flight(make_engine: Maker) -> None:
    engine, shards, delivered = make_engine()
    progress: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: progress.append((done, total)))
    assert shards.in_flight is None
    assert {plan.step for plan in shards.plans} == {0}
    buckets = [plan.bucket for plan in shards.plans]
    assert buckets == engine.scheduler.ladder.warm_up()
    assert shards.sealed_after == [len(buckets)], "sealed once, when every bucket was run"
    assert progress == [(i + 1, len(buckets)) for i in range(len(buckets))]
    engine.add(generate_request("a"))
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 4


@pytest.mark.parametrize(
    ("where", "interrupted_call"),
    [("deliver", 0), *((w, n) for w in ("before", "behind") for n in (1, 2, 3, 4))],
)
def test_an_interrupted_engine_can_be_used_again(
    make_engine: Maker, interrupted_call: int, where: str
) -> None:
    """An interrupt may come before a plan reaches the device, or take an output with it."""
    engine, shards, delivered = make_engine(max_num_seqs=2)
    healthy, calls = shards.step, 0

    def step(payload: bytes) -> bytes:
        nonlocal calls
        calls += 1
        if calls == interrupted_call and where == "before":
            raise KeyboardInterrupt
        answer = healthy(payload)
        if calls == interrupted_call and where == "behind":
            raise KeyboardInterrupt
        return answer

    shards.step = step  # type: ignore[method-assign]
    if where == "deliver":
        engine._deliver = lambda chunks: (_ for _ in ()).throw(KeyboardInterrupt())
    engine.add_all([generate_request(name, max_tokens=20) for name in ("a", "b", "c")])
    with pytest.raises(KeyboardInterrupt):
        step_to_the_end(engine)
    engine._deliver = delivered
    shards.may_drain_nothing = True
    speculation = engine.scheduler.speculation
    engine.abandon()
    assert engine.scheduler.speculation is speculation, "what it knows of the drafter is kept"
    shards.may_drain_nothing = False
    assert shards.in_flight is None
    assert engine.scheduler.stats.requests == {"abort": 3}
    engine.scheduler.check_idle()
    delivered.calls.clear()
    engine.add(generate_request("a", (7, 8), max_tokens=2))
    step_to_the_end(engine)
    assert [chunk.request_id for chunk in delivered.chunks] == ["a"] * len(delivered.chunks)
    assert len(delivered.tokens("a")) == 2
    assert engine.scheduler.stats.requests == {"abort": 3, "length": 1}


def test_abandoning_an_idle_engine_changes_nothing(make_engine: Maker) -> None:
    engine, shards, delivered = make_engine()
    shards.may_drain_nothing = True
    engine.abandon()
    engine.add(generate_request("a"))
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 4


def test_abandoning_forgets_what_is_still_in_the_inbox(make_engine: Maker) -> None:
    engine, shards, _ = make_engine()
    shards.may_drain_nothing = True
    engine.add(generate_request("a"))
    engine.abandon()
    assert not engine.step()
    assert shards.plans == []


def test_an_engine_without_work_checks_that_nothing_is_held(make_engine: Maker) -> None:
    engine, _, _ = make_engine()
    engine.scheduler.pool.allocate(1)
    engine.add(generate_request("a"))
    with pytest.raises(AssertionError):
        step_to_the_end(engine)


# ------------------------------------------------------------------------- dedicated drafters


class FakeDrafters:
    """A `DrafterGroup` of nobody; `calls` is what the engine did."""

    def __init__(self) -> None:
        self.joined, self.waiting = True, False
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.shards: FakeShards | None = None

    def are_joined(self) -> bool:
        return self.joined

    def are_waiting(self) -> bool:
        return self.waiting

    def join(self) -> None:
        assert self.shards is not None
        assert self.shards.in_flight is None, "joined while an output is unread"
        self.calls.append("join")
        self.waiting = False
        if self.error is not None:
            raise self.error
        self.joined = True

    def lose(self) -> None:
        self.calls.append("lose")
        self.joined = False


def dedicated(
    ahead: bool, answer: Answer = one_token_each
) -> tuple[Engine, FakeShards, FakeDrafters]:
    shards, drafters = FakeShards(answer, ahead), FakeDrafters()
    shards.drafters, drafters.shards = drafters, shards  # type: ignore[attr-defined]
    config = engine_config(is_dedicated=True, async_scheduling=ahead)
    return Engine(config, shards, Delivered()), shards, drafters


def drafts_of(plan: StepPlan) -> int:
    assert plan.bucket is not None
    return plan.bucket.num_drafts


def test_drafters_that_a_step_missed_are_lost_before_the_next_plan(ahead: bool) -> None:
    def answer(plan: StepPlan) -> StepOutput:
        return replace(one_token_each(plan), drafters_lost=plan.step == 3)

    engine, shards, drafters = dedicated(ahead, answer)
    engine.add(generate_request("a", max_tokens=20))
    while engine.step():
        pass
    assert drafters.calls == ["lose"]
    assert engine.scheduler.stats.drafter_losses == 1
    first_without = 3 + ahead + 1
    assert [drafts_of(plan) > 0 for plan in shards.plans[: first_without + 3]] == [
        number < first_without for number in range(1, first_without + 4)
    ]
    engine.close()


def test_drafters_come_back_between_two_steps(ahead: bool) -> None:
    engine, shards, drafters = dedicated(ahead)
    engine.add(generate_request("a", max_tokens=30))
    for number in range(6):
        if number == 2:
            drafters.joined = False
        if number == 4:
            drafters.waiting = True
        engine.step()
    assert drafters.calls == ["join"]
    assert engine.scheduler.has_drafter
    assert engine.scheduler.stats.drafter_losses == 1
    engine.add(generate_request("b", max_tokens=20))
    engine.step()
    assert [row.propose for row in shards.plans[-1].decode] == [False], "it goes on plainly"
    assert [row.propose for row in shards.plans[-1].prefill] == [True]
    while engine.step():
        pass
    engine.close()


def test_a_join_that_fails_is_tried_with_others(ahead: bool) -> None:
    engine, _, drafters = dedicated(ahead)
    drafters.joined, drafters.waiting = False, True
    drafters.join = lambda: (
        drafters.calls.append("in vain")
        or setattr(  # type: ignore
            drafters, "waiting", False
        )
    )
    engine.step()
    assert drafters.calls == ["in vain"]
    assert not engine.scheduler.has_drafter
    del drafters.join
    drafters.waiting = True
    engine.step()
    assert drafters.calls == ["in vain", "join"]
    assert engine.scheduler.has_drafter
    engine.close()


def test_a_target_that_is_lost_while_drafters_join_is_a_loss_of_shards(ahead: bool) -> None:
    """Which others replace: requests go on from what they emitted."""
    engine, shards, drafters = dedicated(ahead)
    engine.add(generate_request("a", max_tokens=30))
    engine.step()
    drafters.joined, drafters.waiting = False, True
    drafters.error = ConnectionError("a shard is gone")
    with pytest.raises(ShardsLost, match="a shard is gone"):
        engine.step()
    assert shards.times_closed
    engine.close()


def test_an_idle_engine_looks_after_its_drafters() -> None:
    engine, _, drafters = dedicated(True)
    drafters.joined, drafters.waiting = False, True
    thread = threading.Thread(target=engine.run)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not drafters.joined and time.monotonic() < deadline:
        time.sleep(0.05)
    engine.stop()
    thread.join(WAIT_S)
    assert drafters.calls == ["join"]
    assert engine.scheduler.has_drafter
    engine.close()


def test_colocated_drafters_are_not_looked_after(make_engine: Maker) -> None:
    engine, _, _ = make_engine()  # its shards have no drafters
    engine.add(generate_request("a"))
    while engine.step():
        pass
    assert engine.scheduler.stats.drafter_losses == 0
