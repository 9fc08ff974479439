"""Ranks that are lost are replaced, and no client gets a token twice, wrong, or not at all."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import EngineDead
from actors.messages import (
    DecodeRow,
    GenerateRequest,
    StepOutput,
    StepPlan,
    TokenChunk,
    decode_plan,
    encode,
)
from actors.supervisor import MAX_LOSSES, Supervisor
from tests.unit.actors.builders import engine_config, generate_request

POISON = 63
Fault = Callable[[StepPlan], bool]


def token_behind(position: int) -> int:
    """What plain generation emits, whatever stands before."""
    return 10 + position % 50


def output_of(request: GenerateRequest) -> list[int]:
    first = len(request.prompt_token_ids) - 1
    return [token_behind(first + i) for i in range(request.sampling.max_tokens)]


def answer(plan: StepPlan) -> StepOutput:
    ends = [
        row.position if isinstance(row, DecodeRow) else row.start + len(row.token_ids) - 1
        for row in plan.emitting
    ]
    return StepOutput(
        step=plan.step,
        sampled=tuple((token_behind(end),) for end in ends),
        num_drafts=(0,) * len(ends),
    )


class MortalShards:
    """Ranks that fail in a step whose plan is a `fault`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.in_flight: StepPlan | None = None
        self.plans: list[StepPlan] = []
        self.sealed = self.closed = False

    def step(self, payload: bytes) -> bytes:
        assert not self.closed, "a step after the end"
        plan = decode_plan(payload)
        self.plans.append(plan)
        if plan.rows and self.fault(plan):
            raise RuntimeError("a rank is gone")
        previous, self.in_flight = self.in_flight, plan if plan.bucket else None
        return encode(None if previous is None else answer(previous))

    def seal(self) -> None:
        self.sealed = True

    def close(self) -> None:
        self.closed = True


class World:
    """A supervisor, every group of ranks it made, and what its clients got."""

    def __init__(
        self, faults: Iterable[Fault | Exception], ahead: bool = True, **changes: int
    ) -> None:
        """Each group that is made has the next of `faults`, or is not made but raises it; behind
        them, groups have none."""
        self.faults = iter(faults)
        self.made: list[MortalShards] = []
        self.num_tries = 0
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.waiting_for: set[str] = set()
        # Pages for one request at its longest.
        limits = {"max_model_len": 64, "max_num_batched_tokens": 16, "num_kv_pages": 17} | changes
        config = engine_config(num_drafts=0, async_scheduling=ahead, **limits)
        self.supervisor = Supervisor(config, self.make, self.deliver)

    def make(self) -> MortalShards:
        self.num_tries += 1
        assert all(shards.closed for shards in self.made), "two groups at once"
        fault = next(self.faults, lambda _: False)
        if isinstance(fault, Exception):
            raise fault
        self.made.append(MortalShards(fault))
        return self.made[-1]

    def deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
            if chunk.finish_reason is not None:
                self.waiting_for.discard(chunk.request_id)
        if not self.waiting_for:
            self.supervisor.engine.stop()

    def run(self, *requests: GenerateRequest) -> None:
        """Until all of them have ended."""
        self.waiting_for |= {request.request_id for request in requests}
        self.supervisor.engine.add_all(requests)
        self.supervisor.run()

    def assert_whole(self, request: GenerateRequest) -> None:
        found: list[int] = []
        for chunk in self.chunks[request.request_id]:
            assert chunk.first_index == len(found)
            found += chunk.token_ids
        assert found == output_of(request)
        assert self.chunks[request.request_id][-1].finish_reason == "length"


def in_step(number: int) -> Fault:
    """Fail in the `number`-th step that has rows."""
    count = 0

    def fault(_: StepPlan) -> bool:
        nonlocal count
        count += 1
        return count == number

    return fault


def poisoned(plan: StepPlan) -> bool:
    return any(POISON in row.token_ids for row in plan.prefill)


REQUESTS = [generate_request(f"r{i}", 3 + 9 * i, max_tokens=4 + 3 * i) for i in range(4)]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("number", range(1, 12))
def test_streams_go_on_where_they_were(ahead: bool, number: int) -> None:
    world = World([in_step(number), in_step(2)], ahead)
    world.run(*REQUESTS)
    for request in REQUESTS:
        world.assert_whole(request)
    stats = world.supervisor.engine.scheduler.stats
    assert stats.recoveries == len(world.made) - 1 == 2
    assert stats.output_tokens == sum(len(output_of(request)) for request in REQUESTS)
    assert stats.requests == {"length": len(REQUESTS)}
    assert [shards.closed for shards in world.made] == [True, True, False]
    assert world.made[0].sealed
    world.supervisor.engine.scheduler.check_idle()
    world.supervisor.close()
    assert world.made[-1].closed


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_new_ranks_serve_at_once_and_are_warmed_up_in_between(ahead: bool) -> None:
    request = generate_request("r", 3, max_tokens=40)
    world = World([in_step(3)], ahead)
    world.run(request)
    world.assert_whole(request)
    buckets = world.supervisor.engine.scheduler.ladder.warm_up()
    first, second = world.made
    assert [plan.bucket for plan in first.plans if plan.bucket][: len(buckets)] == buckets
    assert second.plans[0].rows, "requests wait for warm-up"
    padding = [bool(plan.bucket and not plan.rows) for plan in second.plans]
    rows = [bool(plan.rows) for plan in second.plans]
    assert sum(rows[: padding.index(True)]) == 8
    for _ in buckets:  # idle now, and warmed up all the same
        world.supervisor.engine.step()
    assert second.sealed
    assert [p.bucket for p in second.plans if p.bucket and not p.rows] == buckets


def test_a_request_that_kills_is_given_up_and_the_others_are_not() -> None:
    poison = generate_request("poison", (5, POISON, 5), max_tokens=5)
    world = World([poisoned] * 10)
    world.run(*REQUESTS[:2], poison, *REQUESTS[2:])
    for request in REQUESTS:
        world.assert_whole(request)
    (chunk,) = world.chunks["poison"]
    assert (chunk.first_index, chunk.token_ids, chunk.finish_reason) == (0, (), "abort")
    stats = world.supervisor.engine.scheduler.stats
    assert stats.requests == {"length": len(REQUESTS), "error": 1}
    assert stats.recoveries == 3
    world.supervisor.engine.scheduler.check_idle()


def test_who_makes_progress_is_no_suspect() -> None:
    """However often ranks are lost."""
    request = generate_request("long", 3, max_tokens=200)
    world = World([in_step(30) for _ in range(30)], max_model_len=208, num_kv_pages=53)
    world.run(request)
    world.assert_whole(request)
    assert world.supervisor.engine.scheduler.stats.recoveries > MAX_LOSSES


def test_a_request_that_kills_behind_its_first_token_is_given_up() -> None:
    """A replay emits one again each time, which is no progress."""

    def poisoned_decode(plan: StepPlan) -> bool:
        return bool(poisoned_slots(plan) & {row.slot for row in plan.decode})

    def poisoned_slots(plan: StepPlan) -> set[int]:
        slots.update(row.slot for row in plan.prefill if POISON in row.token_ids)
        slots.difference_update(
            row.slot for row in plan.prefill if row.fresh and POISON not in row.token_ids
        )
        return slots

    slots: set[int] = set()
    poison = generate_request("poison", (5, POISON, 5), max_tokens=20)
    world = World([poisoned_decode] * 10)
    world.run(*REQUESTS[:2], poison, *REQUESTS[2:])
    for request in REQUESTS:
        world.assert_whole(request)
    assert world.chunks["poison"][-1].finish_reason == "abort"
    assert world.supervisor.engine.scheduler.stats.recoveries < 6


@pytest.mark.parametrize(("first", "second"), [(30, 44), (44, 30)])
def test_suspects_one_after_the_other_fit_into_the_pages_that_both_do_not(
    first: int, second: int
) -> None:
    requests = [
        generate_request("a", first, max_tokens=20),
        generate_request("b", second, max_tokens=20),
    ]
    world = World([in_step(1), in_step(1)], max_num_batched_tokens=48)
    world.run(*requests)
    for request in requests:
        world.assert_whole(request)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 23)), min_size=1, max_size=6),
    deaths=st.lists(st.integers(1, 25), max_size=12),
    ahead=st.booleans(),
    budget=st.sampled_from([16, 48]),
)
def test_whenever_ranks_are_lost_nobody_gets_a_wrong_token(
    lengths: list[tuple[int, int]], deaths: list[int], ahead: bool, budget: int
) -> None:
    """In a pool of one request's pages, where suspects run alone beside others that wait."""
    requests = [
        generate_request(f"r{i}", prompt, max_tokens=tokens)
        for i, (prompt, tokens) in enumerate(lengths)
    ]
    world = World([in_step(number) for number in deaths], ahead, max_num_batched_tokens=budget)
    try:
        world.run(*requests)
    except EngineDead:
        assert len(deaths) > MAX_LOSSES
        return
    world.supervisor.engine.scheduler.check_idle()
    for request in requests:
        found: list[int] = []
        for chunk in world.chunks[request.request_id]:
            assert chunk.first_index == len(found)
            found += chunk.token_ids
        is_whole = world.chunks[request.request_id][-1].finish_reason == "length"
        assert found == output_of(request)[: len(found)]
        assert is_whole == (len(found) == request.sampling.max_tokens)
        assert is_whole or len(deaths) >= 3


def test_ranks_that_always_fail_end_the_engine() -> None:
    world = World([in_step(1) for _ in range(100)])
    with pytest.raises(EngineDead, match=f"{MAX_LOSSES + 1} times"):
        world.run(*(generate_request(f"r{i}", max_tokens=9) for i in range(100)))
    assert len(world.made) == MAX_LOSSES + 1
    world.supervisor.close()
    assert all(shards.closed for shards in world.made)


def test_ranks_that_can_not_be_made_are_tried_again() -> None:
    world = World([in_step(3), OSError("no node"), OSError("no node")])
    world.run(*REQUESTS)
    for request in REQUESTS:
        world.assert_whole(request)
    assert (world.num_tries, len(world.made)) == (4, 2)


def test_the_first_ranks_that_can_not_be_made_are_the_callers_to_see() -> None:
    with pytest.raises(OSError, match="no node"):
        World([OSError("no node")])


def test_a_rank_that_is_lost_in_idleness_is_replaced() -> None:
    world = World([])
    world.supervisor.engine.lose("it does not answer")
    world.run(REQUESTS[0])
    world.assert_whole(REQUESTS[0])
    assert [shards.closed for shards in world.made] == [True, False]


def test_nothing_is_made_for_an_engine_that_is_stopped() -> None:
    def stopping(_: StepPlan) -> bool:
        world.supervisor.engine.stop()
        return True

    world = World([stopping])
    world.run(*REQUESTS)
    assert len(world.made) == 1


def test_an_output_that_does_not_fit_its_plan_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([])
    monkeypatch.setitem(globals(), "answer", lambda plan: StepOutput(step=plan.step + 1))
    with pytest.raises(EngineDead):
        world.run(*REQUESTS)
    assert len(world.made) == 1
    assert world.made[0].closed


def test_an_abort_while_ranks_are_replaced_is_heard() -> None:
    def aborting(plan: StepPlan) -> bool:
        if count(plan):
            world.supervisor.engine.abort("r0")
            world.waiting_for.discard("r0")
            return True
        return False

    count = in_step(3)
    world = World([aborting])
    world.run(*REQUESTS)
    assert "abort" not in [chunk.finish_reason for chunk in world.chunks["r0"]]
    for request in REQUESTS[1:]:
        world.assert_whole(request)


def test_what_arrives_meanwhile_is_served() -> None:
    late = generate_request("late", 7, max_tokens=6)

    def adding(plan: StepPlan) -> bool:
        if count(plan):
            world.waiting_for.add("late")
            world.supervisor.engine.add(late)
            return True
        return False

    count = in_step(2)
    world = World([adding])
    world.run(*REQUESTS)
    for request in (*REQUESTS, late):
        world.assert_whole(request)
