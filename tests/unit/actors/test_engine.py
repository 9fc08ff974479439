import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from actors.config import EngineConfig
from actors.engine import Engine
from actors.errors import EngineDead, RequestRejected
from actors.messages import StepOutput, StepPlan, TokenChunk, decode_plan, encode
from tests.unit.actors.builders import engine_config, generate_request

WAIT_S = 10.0
Answer = Callable[[StepPlan], StepOutput | None]


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
    """Holds the engine to the protocol: a plan, then an empty plan that drains it."""

    def __init__(self, answer: Answer = one_token_each) -> None:
        self.answer = answer
        self.plans: list[StepPlan] = []
        self.times_closed = 0
        self.threads: set[int] = set()
        self._in_flight: StepPlan | None = None

    def step(self, payload: bytes) -> bytes:
        assert not self.times_closed, "a step after the end"
        self.threads.add(threading.get_ident())
        plan = decode_plan(payload)
        previous, self._in_flight = self._in_flight, plan if plan.bucket else None
        if plan.bucket is None:
            assert previous is not None, "nothing was left to drain"
            assert (plan.decode, plan.prefill, plan.page_updates) == ((), (), ())
        else:
            assert previous is None, "a plan before the last one was drained"
            self.plans.append(plan)
        return encode(None if previous is None else self.answer(previous))

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


def make_engine(
    answer: Answer = one_token_each, config: EngineConfig | None = None
) -> tuple[Engine, FakeShards, Delivered]:
    shards, delivered = FakeShards(answer), Delivered()
    return Engine(config or engine_config(), shards, delivered), shards, delivered


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


def test_without_work_the_shards_are_left_alone() -> None:
    engine, shards, delivered = make_engine()
    assert not engine.step()
    assert (shards.plans, delivered.calls) == ([], [])


def test_a_request_is_stepped_to_its_end() -> None:
    engine, shards, delivered = make_engine(all_accepted)
    engine.add(generate_request("a", 5, max_tokens=6))
    assert engine.step()
    assert engine.step()
    assert not engine.step()
    assert [c.first_index for c in delivered.chunks] == [0, 1, 5]
    assert [len(c.token_ids) for c in delivered.chunks] == [1, 4, 1]
    assert [c.finish_reason for c in delivered.chunks] == [None, None, "length"]
    assert [plan.step for plan in shards.plans] == [1, 2, 3]


def test_a_step_delivers_one_chunk_per_request_in_one_call() -> None:
    engine, _, delivered = make_engine()
    engine.add_all([generate_request("a"), generate_request("b")])
    engine.step()
    assert [[c.request_id for c in call] for call in delivered.calls] == [["a", "b"]]


def test_a_step_that_emits_nothing_delivers_nothing_for_anyone() -> None:
    engine, _, delivered = make_engine(config=engine_config(max_num_batched_tokens=16))
    engine.add(generate_request("a", 40, max_tokens=1))
    assert engine.step()
    assert engine.step()
    assert delivered.chunks == []
    assert not engine.step()
    assert len(delivered.chunks) == 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_rejected_request_leaves_none_queued(bad: int) -> None:
    engine, shards, _ = make_engine()
    requests = [generate_request(name, 1000 if i == bad else 5) for i, name in enumerate("abc")]
    with pytest.raises(RequestRejected):
        engine.add_all(requests)
    assert not engine.step()
    assert shards.plans == []
    engine.scheduler.check_idle()


def test_a_rejected_request_is_not_queued() -> None:
    engine, shards, _ = make_engine()
    with pytest.raises(RequestRejected):
        engine.add(generate_request(max_tokens=0))
    assert not engine.step()
    assert shards.plans == []


def test_a_seed_no_plan_can_carry_does_not_end_the_engine() -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("good"))
    with suppress(RequestRejected):
        engine.add(generate_request("bad", seed=2**64))
    step_to_the_end(engine)
    assert len(delivered.tokens("good")) == 4


def test_an_abort_in_the_same_breath_runs_nothing() -> None:
    engine, shards, _ = make_engine()
    engine.add(generate_request("a"))
    engine.abort("a")
    assert not engine.step()
    assert shards.plans == []
    engine.scheduler.check_idle()


def test_an_abort_while_queued() -> None:
    engine, _, delivered = make_engine(config=engine_config(max_num_seqs=1))
    engine.add_all([generate_request("a"), generate_request("b")])
    engine.step()
    engine.abort("b")
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 4
    assert delivered.tokens("b") == ()
    engine.scheduler.check_idle()


def test_an_abort_in_mid_stream_frees_everything() -> None:
    engine, _, delivered = make_engine()
    engine.add_all([generate_request("a", max_tokens=20), generate_request("b", max_tokens=6)])
    engine.step()
    engine.step()
    engine.abort("a")
    step_to_the_end(engine)
    assert len(delivered.tokens("a")) == 2
    assert len(delivered.tokens("b")) == 6
    engine.scheduler.check_idle()


def test_an_abort_during_a_step_takes_effect_after_it() -> None:
    def abort_inside(plan: StepPlan) -> StepOutput:
        engine.abort("a")
        return one_token_each(plan)

    engine, _, delivered = make_engine(abort_inside)
    engine.add(generate_request("a", max_tokens=20))
    assert not engine.step()
    assert len(delivered.tokens("a")) == 1
    engine.scheduler.check_idle()


def test_an_abort_after_the_end_or_of_a_stranger_is_ignored() -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("a", max_tokens=1))
    assert not engine.step()
    engine.abort("a")
    engine.abort("nobody")
    engine.add(generate_request("b", max_tokens=1))
    assert not engine.step()
    assert delivered.reason("b") == "length"
    assert engine.scheduler.stats.requests == {"length": 2}


def test_an_id_can_be_used_again_right_after_its_abort() -> None:
    engine, _, delivered = make_engine()
    engine.add(generate_request("a", max_tokens=20))
    engine.step()
    engine.abort("a")
    engine.add(generate_request("a", max_tokens=1))
    assert not engine.step()
    assert [c.first_index for c in delivered.chunks] == [0, 0]


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_failed_shard_ends_the_engine(failing_call: int) -> None:
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
    assert len(delivered.tokens("a")) == (failing_call - 1) // 2


def nothing(plan: StepPlan) -> None:
    return None


def output_of_another_step(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step + 1, sampled=((10,),), num_drafts=(0,))


def row_missing(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step)


def row_empty(plan: StepPlan) -> StepOutput:
    return StepOutput(step=plan.step, sampled=((),), num_drafts=(0,))


@pytest.mark.parametrize("answer", [nothing, output_of_another_step, row_missing, row_empty])
def test_an_output_that_does_not_fit_its_plan_ends_the_engine(answer: Answer) -> None:
    engine, shards, _ = make_engine(answer)
    engine.add(generate_request())
    with pytest.raises(EngineDead):
        engine.step()
    assert shards.times_closed == 1


def test_run_ends_with_engine_dead() -> None:
    def fail(plan: StepPlan) -> StepOutput:
        raise RuntimeError("out of memory")

    engine, shards, _ = make_engine(fail)
    engine.add(generate_request())
    with pytest.raises(EngineDead), running(engine) as thread:
        thread.join(WAIT_S)
    assert shards.times_closed == 1


def test_run_wakes_on_add_and_stops_on_stop() -> None:
    engine, shards, delivered = make_engine()
    with running(engine) as thread:
        for name in ("a", "b"):
            engine.add(generate_request(name))
            delivered.wait_for_end(name)
        assert thread.is_alive()
        assert shards.threads == {thread.ident}
    assert [len(delivered.tokens(name)) for name in ("a", "b")] == [4, 4]
    engine.scheduler.check_idle()


def test_run_serves_many_threads_at_once() -> None:
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


def test_run_sleeps_while_idle() -> None:
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


def test_an_abort_wakes_run_and_ends_a_stream() -> None:
    aborted = threading.Event()

    def slowly(plan: StepPlan) -> StepOutput:
        aborted.wait(0.001)
        return one_token_each(plan)

    config = engine_config(max_model_len=4000)
    engine, _, delivered = make_engine(slowly, config)
    with running(engine):
        engine.add(generate_request("a", max_tokens=3900))
        delivered.wait_for(lambda: len(delivered.calls) >= 3)
        engine.abort("a")
        aborted.set()
        engine.add(generate_request("b", max_tokens=1))
        delivered.wait_for_end("b")
    assert len(delivered.tokens("a")) < 3900
    engine.scheduler.check_idle()


def test_stop_ends_run_with_work_left() -> None:
    engine, _, delivered = make_engine(config=engine_config(max_model_len=4000))
    with running(engine):
        engine.add(generate_request("a", max_tokens=3900))
        delivered.wait_for(lambda: len(delivered.calls) >= 3)
    assert engine.scheduler.has_work
    assert len(delivered.tokens("a")) < 3900


def test_stop_before_run_returns_at_once() -> None:
    engine, shards, _ = make_engine()
    engine.add(generate_request())
    engine.stop()
    engine.run()
    assert shards.plans == []
