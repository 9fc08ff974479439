"""The scheduler against simulated devices, and what it does in cases that matter by themselves."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import EngineConfig
from actors.messages import GenerateRequest, StepOutput, StepPlan, TokenChunk
from actors.scheduler import Scheduler
from tests.unit.actors.builders import EOS, GUIDE, VOCAB, engine_config, generate_request
from tests.unit.actors.fake_grammar import FakeGrammars, masks_behind
from tests.unit.actors.simulation import Simulation

STOP = 2
# None of the requests is guided, or some, or all.
GUIDES = [[None], [None, GUIDE], [GUIDE]]


@dataclass(frozen=True)
class Arrive:
    request: GenerateRequest


@dataclass(frozen=True)
class Abort:
    request: int


@dataclass(frozen=True)
class Submit:
    seed: int
    acceptance: float


@dataclass(frozen=True)
class Read:
    pass


@dataclass(frozen=True)
class Crash:
    pass


@dataclass(frozen=True)
class LoseDrafter:
    noticed: bool


@dataclass(frozen=True)
class RegainDrafter:
    pass


Operation = Arrive | Abort | Submit | Read | Crash | LoseDrafter | RegainDrafter


def prompt_of(family: int, num_shared: int, seed: int, length: int) -> tuple[int, ...]:
    """Its first `num_shared` tokens are those of its family, the others of its own."""
    return tuple(
        ((family if i < num_shared else 2 + seed) * 7 + i * i) % VOCAB for i in range(length)
    )


def with_losses(draw: st.DrawFn, config: EngineConfig, operations: list[Operation]) -> None:
    """Let dedicated drafters be lost and come back now and then, in half of all cases."""
    if config.drafter is None or draw(st.booleans()):
        return
    for _ in range(draw(st.integers(1, 4))):
        operation = draw(st.sampled_from([LoseDrafter(True), LoseDrafter(False), RegainDrafter()]))
        operations.insert(draw(st.integers(0, len(operations))), operation)


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[EngineConfig, list[Operation]]:
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
        num_kv_pages=per_request + 1 + draw(st.integers(0, (seqs - 1) * per_request)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        verify_widths=(*sorted(draw(st.sets(st.integers(1, num_drafts or 1)))), num_drafts + 1)
        if num_drafts
        else None,
    )
    guides = draw(st.sampled_from(GUIDES))
    kinds = draw(
        st.lists(st.sampled_from(["arrive", "abort", "submit", "submit", "read"]), max_size=60)
    )
    if draw(st.integers(0, 2)) == 0:
        kinds.insert(draw(st.integers(0, len(kinds))), "crash")
    operations: list[Operation] = []
    arrived = 0
    for kind in kinds:
        if kind == "arrive":
            length = draw(st.integers(1, max_model_len - 1))
            request = generate_request(
                f"r{arrived}",
                prompt_of(draw(st.integers(0, 1)), draw(st.integers(0, length)), arrived, length),
                max_tokens=draw(st.integers(1, 30)),
                seed=arrived,
                stop_token_ids=draw(st.sampled_from([(), (STOP,), tuple(range(2, 9))])),
                ignore_eos=draw(st.booleans()),
                prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
                presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
                guide=draw(st.sampled_from(guides)),
                priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
                cache_salt=draw(st.sampled_from(["", "", "", "salt"])),
                max_draft_tokens=draw(
                    st.sampled_from([None, None, 0, 1, 2] if num_drafts else [None, 0])
                ),
            )
            operations.append(Arrive(request))
            arrived += 1
        elif kind == "submit":
            acceptance = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
            operations.append(Submit(draw(st.integers(0, 1000)), acceptance))
        elif kind == "read":
            operations.append(Read())
        elif kind == "crash":
            operations.append(Crash())
        elif arrived:
            operations.append(Abort(draw(st.integers(0, arrived - 1))))
    with_losses(draw, config, operations)
    return config, operations


@st.composite
def crowds(draw: st.DrawFn) -> tuple[EngineConfig, list[Operation]]:
    """Long requests with beginnings in common, in a pool that holds few of them."""
    num_drafts = draw(st.integers(0, 4))
    seqs = draw(st.integers(2, 4))
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(16, 60))
    per_request = -(-max_model_len // block_size)
    config = engine_config(
        num_drafts=num_drafts,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(16, seqs * (num_drafts + 1)) + draw(st.integers(0, 40)),
        block_size=block_size,
        num_kv_pages=per_request + 1 + draw(st.integers(0, per_request // 2)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        drafter_positions=draw(st.sampled_from([4096, 4096, max_model_len // 2 + 1])),
    )
    guides = draw(st.sampled_from(GUIDES))
    operations: list[Operation] = []
    for index in range(draw(st.integers(2, 8))):
        length = draw(st.integers(1, max_model_len // 2))
        request = generate_request(
            f"r{index}",
            prompt_of(draw(st.integers(0, 1)), draw(st.integers(0, length)), index, length),
            max_tokens=draw(st.integers(8, 60)),
            seed=index,
            ignore_eos=draw(st.booleans()),
            presence_penalty=draw(st.sampled_from([0.0, 1.0])),
            guide=draw(st.sampled_from(guides)),
            priority=draw(st.sampled_from([0, 0, 1, -1])),
            max_draft_tokens=draw(st.sampled_from([None, None, 0])),
        )
        operations.append(Arrive(request))
        for _ in range(draw(st.integers(0, 6))):
            operations.append(Submit(draw(st.integers(0, 1000)), draw(st.sampled_from([0.3, 1.0]))))
            operations += [Read()] * draw(st.integers(0, 1))
        if draw(st.integers(0, 3)) == 0:
            operations.append(Abort(draw(st.integers(0, index))))
    if draw(st.integers(0, 2)) == 0:
        operations.insert(draw(st.integers(0, len(operations))), Crash())
    with_losses(draw, config, operations)
    return config, operations


@settings(max_examples=400, deadline=None)
@given(
    scenario=scenarios() | crowds(),
    leave_out_seed=st.none() | st.integers(0, 1000),
    drafts_seed=st.none() | st.integers(0, 1000),
    seed=st.integers(0, 1000),
    ahead=st.booleans(),
)
def test_any_traffic_keeps_the_invariants(
    scenario: tuple[EngineConfig, list[Operation]],
    leave_out_seed: int | None,
    drafts_seed: int | None,
    seed: int,
    ahead: bool,
) -> None:
    """Steps are read before the next is planned or after, requests end at any moment, the device
    loses all it knows at some, and dedicated drafters do."""
    config, operations = scenario
    simulation = Simulation(config, leave_out_seed, drafts_seed)
    for operation in operations:
        match operation:
            case Arrive(request):
                simulation.add(request)
            case Abort(index):
                simulation.abort(f"r{index}")
            case Submit(step_seed, acceptance):
                if len(simulation.unread) == 2:
                    simulation.read()
                simulation.submit(random.Random(step_seed), acceptance)
            case Read():
                if simulation.unread:
                    simulation.read()
            case Crash():
                simulation.crash()
            case LoseDrafter(noticed):
                simulation.lose_drafter(noticed)
            case RegainDrafter():
                simulation.regain_drafter()
    simulation.drain(random.Random(seed), 0.7, ahead)
    for client in simulation.clients:
        assert client.aborted or client.seen == client.plain


@pytest.mark.parametrize("leave_out_seed", [None, 1])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_running_ahead_shows_clients_the_same(num_drafts: int, leave_out_seed: int | None) -> None:
    """A long run with every kind of end, of requests that queue; the schedules do differ."""
    seen = []
    for ahead in (False, True):
        config = engine_config(num_drafts=num_drafts, max_num_seqs=3, num_kv_pages=40)
        simulation = Simulation(config, leave_out_seed)
        for i in range(12):
            simulation.add(generate_request(f"r{i}", tuple(range(3, 4 + i)), max_tokens=40, seed=i))
        simulation.drain(random.Random(0), 0.6, ahead)
        seen.append([client.seen for client in simulation.clients])
        assert set(simulation.finished) == {"stop", "length"}
        assert any(client.wasted_rows for client in simulation.clients) == ahead
    assert seen[0] == seen[1]


def answer(plan: StepPlan, runs: Sequence[tuple[int, ...]]) -> StepOutput:
    """The device's answer to `plan`, with every planned draft verified."""
    num_drafts = [row.num_drafts for row in plan.decode]
    num_drafts += [0 for row in plan.prefill if row.last]
    return StepOutput(step=plan.step, sampled=tuple(runs), num_drafts=tuple(num_drafts))


def read(scheduler: Scheduler, plan: StepPlan, *runs: tuple[int, ...]) -> list[TokenChunk]:
    return scheduler.update(answer(plan, runs), seconds=0.01)


def advance(scheduler: Scheduler, *runs: tuple[int, ...]) -> list[TokenChunk]:
    return read(scheduler, scheduler.schedule(), *runs)


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
    assert scheduler.schedule().step == first.step + 1


def test_a_long_prompt_never_starves_a_stream() -> None:
    config = engine_config(num_drafts=3, max_model_len=400, max_num_batched_tokens=20)
    scheduler = Scheduler(config)
    scheduler.add(generate_request("stream", max_tokens=100))
    advance(scheduler, (10,))
    scheduler.add(generate_request("long", (EOS,) * 300, max_tokens=1))
    fed = 0
    while fed < 300:
        plan = scheduler.schedule()
        assert [row.slot for row in plan.decode] == [0]
        fed += sum(len(row.token_ids) for row in plan.prefill)
        runs = [(10,)] * (1 + (fed == 300))
        read(scheduler, plan, *runs)
    # The budget less the verified row is what a chunk may have: 300 tokens take 19 steps of 16.
    assert scheduler.stats.verify_steps == 19


def test_a_request_that_waits_for_pages_keeps_its_turn() -> None:
    config = engine_config(
        max_model_len=16, block_size=4, num_kv_pages=7, enable_prefix_caching=False
    )
    scheduler = Scheduler(config)
    for name, prompt in (("first", 9), ("large", 15), ("small", 1)):
        scheduler.add(generate_request(name, prompt, max_tokens=3))
    plan = scheduler.schedule()
    assert [len(row.token_ids) for row in plan.prefill] == [9]
    scheduler.abort("first")
    assert scheduler.schedule().bucket is None
    read(scheduler, plan, (10,))
    assert [len(row.token_ids) for row in scheduler.schedule().prefill] == [15, 1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 9])
def test_a_prompt_one_short_of_the_limit_gives_one_token(num_drafts: int, ahead: bool) -> None:
    simulation = Simulation(engine_config(num_drafts=num_drafts, max_num_batched_tokens=64))
    simulation.add(generate_request("a", 63, max_tokens=50, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), 1.0, ahead)
    assert [(len(c.token_ids), c.finish_reason) for c in chunks] == [(1, "length")]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("short", range(1, 24))
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_the_end_of_the_context_is_reached_exactly(
    short: int, acceptance: float, ahead: bool
) -> None:
    simulation = Simulation(engine_config(num_drafts=9, max_num_batched_tokens=64))
    simulation.add(generate_request("a", 64 - short, max_tokens=100, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), acceptance, ahead)
    assert sum(len(chunk.token_ids) for chunk in chunks) == short
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_mixed_max_tokens_in_one_batch(acceptance: float, ahead: bool) -> None:
    k = 5
    simulation = Simulation(engine_config(num_drafts=k, max_num_seqs=6))
    limits = [1, 2, k, k + 1, k + 2, 3 * k]
    for limit in limits:
        simulation.add(generate_request(f"r{limit}", max_tokens=limit, seed=limit, ignore_eos=True))
    chunks = simulation.drain(random.Random(0), acceptance, ahead)
    lengths: Counter[str] = Counter()
    for chunk in chunks:
        lengths[chunk.request_id] += len(chunk.token_ids)
    assert lengths == {f"r{limit}": limit for limit in limits}
    assert simulation.scheduler.stats.requests == {"length": 6}


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


def test_late_compiles_are_those_of_the_last_output() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request(max_tokens=20))
    for count in (0, 2, 3):
        output = answer(scheduler.schedule(), [(10,)])
        scheduler.update(replace(output, late_compiles=count), seconds=0.01)
        assert scheduler.stats.late_compiles == count


def test_the_output_of_another_step_is_our_bug() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request())
    plan = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.update(
            StepOutput(step=plan.step + 1, sampled=((1,),), num_drafts=(0,)), seconds=0.01
        )


def test_check_idle_finds_what_is_held() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request())
    with pytest.raises(AssertionError):
        scheduler.check_idle()


# ----------------------------------------------------------------------------- one step unread


def test_the_next_step_is_planned_as_if_every_draft_were_accepted() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request(prompt=5, max_tokens=20))
    prefill = scheduler.schedule()
    first = scheduler.schedule()
    read(scheduler, prefill, (10,))
    second = scheduler.schedule()
    read(scheduler, first, (11, 12))
    third = scheduler.schedule()
    rows = [plan.decode[0] for plan in (first, second, third)]
    assert [(row.position, row.num_drafts) for row in rows] == [(5, 3), (9, 3), (5 + 2 + 4, 3)]
    assert all(row.prev_in_flight for row in rows)


def test_a_row_left_out_of_a_step_is_planned_exactly_in_the_next() -> None:
    """It ran in the last but one step, which has been read by then."""
    wishes = iter([None, None, "a", None])
    scheduler = Scheduler(engine_config(num_drafts=3), leave_out=lambda ids: next(wishes))
    for name in ("a", "b"):
        scheduler.add(generate_request(name, max_tokens=20))
    prefill = scheduler.schedule()
    first = scheduler.schedule()
    read(scheduler, prefill, (10,), (10,))
    without = scheduler.schedule()
    assert [row.slot for row in without.decode] == [1]
    read(scheduler, first, (11, 12), (11,))
    a, b = scheduler.schedule().decode
    assert (a.prev_in_flight, a.position) == (False, 5 + 2)
    assert (b.prev_in_flight, b.position) == (True, 5 + 1 + 4)


def test_leaving_out_is_asked_once_a_step_and_never_stops_the_engine() -> None:
    asked: list[list[str]] = []

    def always_the_first(ids: Sequence[str]) -> str:
        asked.append(list(ids))
        return ids[0]

    scheduler = Scheduler(engine_config(num_drafts=0), leave_out=always_the_first)
    scheduler.add(generate_request("a", max_tokens=3))
    prefill = scheduler.schedule()
    assert prefill.prefill, "nothing else could be done"
    assert scheduler.schedule().bucket is None
    read(scheduler, prefill, (10,))
    assert [row.slot for row in scheduler.schedule().decode] == [0]
    assert asked == [["a"]] * 3


def test_a_request_at_its_optimistic_limit_waits_for_its_output() -> None:
    """Five tokens may come of the unread step; when one did, the request goes on."""
    scheduler = Scheduler(engine_config(num_drafts=4))
    scheduler.add(generate_request("a", max_tokens=6))
    advance(scheduler, (10,))
    plan = scheduler.schedule()
    assert [row.num_drafts for row in plan.decode] == [4]
    assert scheduler.schedule().bucket is None
    read(scheduler, plan, (11,))
    (row,) = scheduler.schedule().decode
    assert (row.position, row.num_drafts, row.prev_in_flight) == (6, 3, False)


@pytest.mark.parametrize("prompt", [5, 40])
def test_without_speculation_no_step_is_missed_or_wasted(prompt: int) -> None:
    scheduler = Scheduler(engine_config(num_drafts=0))
    scheduler.add(generate_request("a", prompt, max_tokens=7))
    plans = [scheduler.schedule()]
    tokens = 0
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        runs = [(10,)] if plans[-2].decode or plans[-2].prefill[-1].last else []
        tokens += sum(len(chunk.token_ids) for chunk in read(scheduler, plans[-2], *runs))
    assert tokens == 7
    # The last plan only drains.
    chunks = -(-prompt // 32)
    assert [bool(plan.bucket) for plan in plans] == [True] * (chunks + 6) + [False]
    positions = [row.position for plan in plans for row in plan.decode]
    assert positions == list(range(prompt, prompt + 6))


def test_a_stop_read_late_wastes_one_row_and_frees_behind_it() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3, max_num_seqs=1))
    scheduler.add(generate_request("a", max_tokens=20))
    scheduler.add(generate_request("b", max_tokens=20))
    prefill = scheduler.schedule()
    wasted = scheduler.schedule()
    (chunk,) = read(scheduler, prefill, (EOS,))
    assert (chunk.token_ids, chunk.finish_reason) == ((EOS,), "stop")
    assert scheduler.schedule().bucket is None, "the slot is not free before its last row was read"
    assert read(scheduler, wasted, (11, 12)) == []
    assert scheduler.stats.verify_steps == scheduler.stats.draft_tokens == 0
    assert scheduler.stats.output_tokens == 1
    (row,) = scheduler.schedule().prefill
    assert (row.slot, row.fresh) == (0, True)


def test_an_abort_ends_at_once_and_frees_behind_the_last_unread_row() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    pool = scheduler.pool
    scheduler.add(generate_request("a", max_tokens=20))
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.stats.requests == {"abort": 1}
    assert scheduler.num_requests == 0
    assert scheduler.has_work
    assert read(scheduler, prefill, (10,)) == []
    assert pool.num_free < pool.num_usable
    assert read(scheduler, decode, (11, 12)) == []
    scheduler.check_idle()
    assert scheduler.stats.output_tokens == 0


def test_an_abort_in_the_middle_of_a_prompt_frees_behind_all_its_rows() -> None:
    scheduler = Scheduler(engine_config(max_num_batched_tokens=18))
    scheduler.add(generate_request("a", 60, max_tokens=3))
    plan = scheduler.schedule()
    assert len(plan.prefill) > 1
    scheduler.abort("a")
    assert read(scheduler, plan) == []
    scheduler.check_idle()


def test_an_id_aborted_in_flight_can_be_used_at_once() -> None:
    scheduler = Scheduler(engine_config(num_drafts=0))
    scheduler.add(generate_request("a", (3, 4), max_tokens=20))
    first = scheduler.schedule()
    scheduler.abort("a")
    scheduler.add(generate_request("a", (7, 8, 9), max_tokens=2))
    second = scheduler.schedule()
    assert [row.slot for row in second.prefill] == [1]
    assert read(scheduler, first, (10,)) == []
    (chunk,) = read(scheduler, second, (11,))
    assert (chunk.first_index, chunk.token_ids) == (0, (11,))


def test_only_one_step_may_be_unread() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request(max_tokens=20))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="one step only"):
        scheduler.schedule()


def test_an_output_without_a_step_is_our_bug() -> None:
    with pytest.raises(IndexError):
        Scheduler(engine_config()).update(StepOutput(step=0), seconds=0.01)


def test_more_tokens_than_were_fed_are_our_bug() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request(max_tokens=20))
    advance(scheduler, (10,))
    with pytest.raises(AssertionError, match="more than it fed"):
        advance(scheduler, (10,) * 5)


def test_check_idle_finds_what_is_unread() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(generate_request())
    scheduler.schedule()
    scheduler.abort("a")
    with pytest.raises(AssertionError):
        scheduler.check_idle()


# --------------------------------------------------------------------------------------- guided


def guided_scheduler(**changes: Any) -> tuple[Scheduler, FakeGrammars]:
    grammars = FakeGrammars()
    return Scheduler(engine_config(**changes), grammars=grammars), grammars


def slots_of(plan: StepPlan) -> list[int]:
    return [row.slot for row in plan.decode]


def test_guided_rows_wait_for_their_output_while_the_others_run_ahead() -> None:
    scheduler, _ = guided_scheduler(num_drafts=0)
    for name, guide in (("guided", GUIDE), ("plain", None), ("also guided", GUIDE)):
        scheduler.add(generate_request(name, max_tokens=20, guide=guide))
    last, found = scheduler.schedule(), []
    for _ in range(4):
        plan = scheduler.schedule()
        found.append([(row.slot, row.prev_in_flight) for row in plan.decode])
        read(scheduler, last, *((10,) for _ in last.emitting))
        last = plan
    assert found == [[(1, True)], [(0, False), (1, True), (2, False)]] * 2


def test_guided_rows_go_together_where_there_are_no_others() -> None:
    scheduler, _ = guided_scheduler(num_drafts=0)
    scheduler.add(generate_request("a", max_tokens=20, guide=GUIDE))
    advance(scheduler, (10,))
    decode = scheduler.schedule()
    scheduler.add(generate_request("b", max_tokens=20, guide=GUIDE))
    # One could start, but the other's output is unread.
    assert scheduler.schedule() == StepPlan(step=decode.step)
    read(scheduler, decode, (10,))
    both = scheduler.schedule()
    assert (slots_of(both), [row.slot for row in both.prefill]) == ([0], [1])
    read(scheduler, both, (10,), (10,))
    for _ in range(3):
        plan = scheduler.schedule()
        assert slots_of(plan) == [0, 1]
        assert scheduler.schedule() == StepPlan(step=plan.step)
        read(scheduler, plan, (10,), (10,))


def test_the_chunks_of_a_guided_prompt_run_ahead() -> None:
    scheduler, _ = guided_scheduler(num_drafts=0, max_num_batched_tokens=16)
    scheduler.add(generate_request("a", 40, max_tokens=20, guide=GUIDE))
    first, second = scheduler.schedule(), scheduler.schedule()
    read(scheduler, first)
    third = scheduler.schedule()
    read(scheduler, second)
    assert scheduler.schedule().bucket is None, "the first token is unread"
    read(scheduler, third, (10,))
    assert slots_of(scheduler.schedule()) == [0]
    guided = [plan.bucket is not None and plan.bucket.guided for plan in (first, second, third)]
    assert guided == [False, False, True]


def test_a_grammar_gets_what_was_kept() -> None:
    scheduler, grammars = guided_scheduler(num_drafts=3)
    for name, max_tokens in (("limit", 3), ("stop", 20), ("abort", 20)):
        scheduler.add(generate_request(name, max_tokens=max_tokens, guide=GUIDE))
    drafts = (10, 11, 12)
    prefill = scheduler.schedule()
    scheduler.update(replace(answer(prefill, [(9,)] * 3), drafts=(drafts,) * 3), seconds=0.01)
    plan = scheduler.schedule()
    assert [row.num_drafts for row in plan.decode] == [1, 3, 3]
    scheduler.abort("abort")
    read(scheduler, plan, (10, 13), (10, EOS, 12, 13), (10, 11))
    assert [state.committed for state in grammars.started] == [(9, 10, 13), (9, 10, EOS), (9,)]
    scheduler.check_idle()


@pytest.mark.parametrize("is_stop", [False, True])
@pytest.mark.parametrize("failure", ["", "it is too large"])
def test_a_grammar_that_fails_ends_its_request_for_length(
    failure: str, is_stop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, grammars = guided_scheduler()
    scheduler.add(generate_request("a", max_tokens=2, guide=GUIDE))
    scheduler.add(generate_request("b", max_tokens=2, guide=GUIDE))
    advance(scheduler, (10,), (10,))
    grammars.started[0].failure = failure
    ends = advance(scheduler, *[(EOS if is_stop else 10,)] * 2)
    expected = "stop" if is_stop else "length"
    assert [chunk.finish_reason for chunk in ends] == ["length" if failure else expected, expected]
    assert scheduler.stats.requests == Counter(chunk.finish_reason for chunk in ends)
    assert [record.getMessage() for record in caplog.records] == (
        [f"request a: {failure}"] if failure and is_stop else []
    )


def test_a_preempted_request_keeps_its_grammars_state() -> None:
    scheduler, grammars = guided_scheduler(
        num_drafts=0, max_model_len=16, block_size=4, num_kv_pages=5, enable_prefix_caching=False
    )
    for name in ("a", "b"):
        scheduler.add(generate_request(name, 7, max_tokens=6, guide=GUIDE))
    advance(scheduler, (10,), (20,))
    advance(scheduler, (11,), (21,))
    tokens = iter(range(12, 16))
    while scheduler.stats.requests.total() == 0:
        plan = scheduler.schedule()
        assert slots_of(plan) == [0]
        read(scheduler, plan, (next(tokens),))
    assert scheduler.stats.preemptions == 1
    (row,) = scheduler.schedule().prefill
    assert (row.token_ids[-2:], row.masks) == ((20, 21), tuple(masks_behind((20, 21))))
    assert len(grammars.started) == 2


# ------------------------------------------------------------------------------ overlapped halves


def overlapping_scheduler(num_requests: int, max_tokens: int = 40) -> Scheduler:
    """Each of the requests has its prompt computed and its first token read."""
    scheduler = Scheduler(engine_config(num_drafts=3, is_dedicated=True, overlap="always"))
    for i in range(num_requests):
        scheduler.add(generate_request(f"r{i}", max_tokens=max_tokens))
    plan = scheduler.schedule()
    assert [row.slot for row in plan.prefill] == list(range(num_requests))
    read(scheduler, plan, *((10,) for _ in plan.emitting))
    return scheduler


@pytest.mark.parametrize("num_requests", [2, 3, 4])
def test_halves_of_a_batch_are_verified_in_turn(num_requests: int) -> None:
    scheduler = overlapping_scheduler(num_requests)
    last = scheduler.schedule()
    assert scheduler.num_unread == 1
    for _ in range(6):
        plan = scheduler.schedule()
        assert plan.defers_drafts
        assert not set(slots_of(plan)) & set(slots_of(last)), "its drafts are not there yet"
        assert sorted([*slots_of(plan), *slots_of(last)]) == list(range(num_requests))
        assert len(slots_of(plan)) <= -(-num_requests // 2)
        assert [row.num_drafts for row in plan.decode] == [3] * len(plan.decode)
        assert not any(row.prev_in_flight for row in plan.decode)
        read(scheduler, last, *((10, 11) for _ in last.emitting))
        last = plan


def test_a_request_alone_has_no_other_half() -> None:
    scheduler = overlapping_scheduler(1)
    last = scheduler.schedule()
    plan = scheduler.schedule()
    assert (slots_of(last), slots_of(plan)) == ([0], [0])
    assert not last.defers_drafts
    assert not plan.defers_drafts


def test_a_batch_with_a_grammar_or_without_drafts_is_verified_as_a_whole() -> None:
    config = engine_config(num_drafts=3, is_dedicated=True, overlap="always")
    scheduler = Scheduler(config, grammars=FakeGrammars())
    scheduler.add(generate_request("guided", max_tokens=20, guide=GUIDE))
    scheduler.add(generate_request("plain", max_tokens=20))
    advance(scheduler, (10,), (10,))
    plan = scheduler.schedule()
    assert (slots_of(plan), plan.defers_drafts) == ([0, 1], False)

    scheduler = overlapping_scheduler(2)
    scheduler.lose_drafter()
    plan = scheduler.schedule()
    assert (slots_of(plan), plan.defers_drafts) == ([0, 1], False)


def test_auto_overlaps_where_halves_were_measured_to_be_faster() -> None:
    def first_plan(half_s: float) -> StepPlan:
        config = engine_config(
            num_drafts=3, is_dedicated=True, overlap="auto", adaptive_drafts=True
        )
        scheduler = Scheduler(config)
        for num_drafts in scheduler.speculation.choices:
            scheduler.speculation.observe_time(2, num_drafts, 1.0)
        scheduler.speculation.observe_overlap(2, 3, half_s)
        for name in ("a", "b"):
            scheduler.add(generate_request(name, max_tokens=40))
        advance(scheduler, (10,), (10,))
        return scheduler.schedule()

    slower, faster = first_plan(0.6), first_plan(0.4)
    assert (slots_of(slower), slower.defers_drafts) == ([0, 1], False)
    assert (slots_of(faster), faster.defers_drafts) == ([0], True)
