"""Prefix hits, pages on demand, preemption and priorities, case by case."""

import random
from typing import Any

import pytest

from actors.messages import DecodeRow, StepOutput, StepPlan
from actors.scheduler import Scheduler
from tests.unit.actors.builders import EOS, engine_config, generate_request
from tests.unit.actors.simulation import Client, Simulation

PROMPT = tuple(range(10, 30))


def drained(simulation: Simulation, ahead: bool = True, acceptance: float = 0.6) -> None:
    simulation.drain(random.Random(0), acceptance, ahead)
    for client in simulation.clients:
        assert client.seen == client.plain


def add(simulation: Simulation, name: str, prompt: int | tuple[int, ...], **changes: Any) -> Client:
    changes = {"max_tokens": 8, "ignore_eos": True, **changes}
    return simulation.add(generate_request(name, prompt, seed=len(simulation.clients), **changes))


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every row emits one token, that is no end."""
    num_drafts = [row.num_drafts if isinstance(row, DecodeRow) else 0 for row in plan.emitting]
    sampled = ((9,),) * len(num_drafts)
    output = StepOutput(step=plan.step, sampled=sampled, num_drafts=tuple(num_drafts))
    scheduler.update(output, seconds=0.01)


def advance(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    answer(scheduler, plan)
    return plan


def test_the_same_prompt_again_is_cached_but_for_its_last_page() -> None:
    simulation = Simulation(engine_config(block_size=4))
    for name in ("cold", "warm"):
        add(simulation, name, PROMPT)
        drained(simulation)
    cold, warm = simulation.clients
    # Of 20 tokens one at least has to be computed, so the fifth page is.
    assert (cold.cached, warm.cached) == (0, 16)
    stats = simulation.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)


def test_the_next_turn_finds_the_last_answer() -> None:
    simulation = Simulation(engine_config(block_size=4))
    first = add(simulation, "first", PROMPT, max_tokens=10)
    drained(simulation)
    add(simulation, "next", (*PROMPT, *first.seen, 5, 6), max_tokens=10)
    drained(simulation)
    # The last token that was emitted was not fed: 29 tokens are 7 full pages.
    assert simulation.clients[1].cached == 28


def test_a_prefix_is_shared_while_its_first_request_runs() -> None:
    simulation = Simulation(engine_config(block_size=4))
    add(simulation, "a", PROMPT, max_tokens=30)
    simulation.submit(random.Random(0), 1.0)
    simulation.read()
    add(simulation, "b", PROMPT, max_tokens=30)
    simulation.submit(random.Random(0), 1.0)
    a, b = simulation.running
    assert b.cached == 16
    assert a.pages[:4] == b.pages[:4]
    assert not set(a.pages[4:]) & set(b.pages[4:])
    drained(simulation)


@pytest.mark.parametrize(
    "changes",
    [{"cache_salt": "other"}, {"prompt_logprobs": 0}],
    ids=["another salt", "prompt logprobs"],
)
def test_who_takes_nothing_from_the_cache(changes: dict[str, Any]) -> None:
    simulation = Simulation(engine_config())
    add(simulation, "cold", PROMPT)
    drained(simulation)
    add(simulation, "other", PROMPT, **changes)
    drained(simulation)
    assert simulation.clients[1].cached == 0
    looked = 40 if "cache_salt" in changes else 20
    assert simulation.scheduler.stats.prefix_cache_queries == looked


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    simulation = Simulation(engine_config(enable_prefix_caching=False))
    for name in ("a", "b"):
        add(simulation, name, PROMPT)
        drained(simulation)
    stats = simulation.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


@pytest.mark.parametrize("max_draft_tokens", [None, 1, 0])
def test_only_who_never_drafts_takes_pages_without_a_drafter_half(
    max_draft_tokens: int | None,
) -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request("cold", PROMPT, max_tokens=1))
    advance(scheduler)
    scheduler.pool.clear_drafter_valid()
    scheduler.add(generate_request("warm", PROMPT, max_tokens=1, max_draft_tokens=max_draft_tokens))
    row = advance(scheduler).prefill[0]
    assert row.start == (16 if max_draft_tokens == 0 else 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pool_too_small_for_all_preempts_the_last_that_came(ahead: bool) -> None:
    """Each needs 13 pages in the end, and 16 there are."""
    config = engine_config(num_drafts=3, block_size=4, max_model_len=52, num_kv_pages=17)
    simulation = Simulation(config)
    for i, name in enumerate("abc"):
        add(simulation, name, (i, *PROMPT[:7]), max_tokens=44)
    chunks = simulation.drain(random.Random(0), 0.6, ahead)
    ended = [chunk.request_id for chunk in chunks if chunk.finish_reason]
    assert ended == ["a", "b", "c"]
    assert simulation.scheduler.stats.preemptions > 0
    for client in simulation.clients:
        assert client.seen == client.plain


def test_a_preempted_request_computes_again_only_what_was_not_cached() -> None:
    config = engine_config(num_drafts=0, block_size=4, max_model_len=32, num_kv_pages=9)
    scheduler = Scheduler(config)
    for i, name in enumerate("ab"):
        scheduler.add(generate_request(name, (40 + i, *PROMPT[:11]), max_tokens=20))

    while scheduler.stats.preemptions == 0:
        advance(scheduler)
    assert [r.request_id for r in scheduler.allocation.running.values()] == ["a"]
    (b,) = scheduler.allocation.waiting
    assert b.request_id == "b"
    num_known = b.num_tokens
    assert num_known > 12
    scheduler.abort("a")
    (row,) = advance(scheduler).prefill
    assert row.fresh
    assert row.last
    # Four of its pages were full, and the last of them went to the other request.
    assert (num_known - 1) // 4 == 4
    assert row.start == 12
    assert row.start + len(row.token_ids) == num_known
    assert b.cached_tokens == 0, "of its prompt nothing was cached when it first started"


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_of_a_preempted_request_frees_everything(ahead: bool) -> None:
    config = engine_config(num_drafts=3, block_size=4, max_model_len=52, num_kv_pages=17)
    simulation = Simulation(config)
    for i, name in enumerate("abc"):
        add(simulation, name, (i, *PROMPT[:7]), max_tokens=44)
    rng = random.Random(0)
    while simulation.scheduler.stats.preemptions == 0:
        simulation.submit(rng, 1.0)
        while len(simulation.unread) > ahead:
            simulation.read()
    simulation.abort("c")
    drained_clients = simulation.clients[:2]
    simulation.drain(rng, 1.0, ahead)
    assert all(client.seen == client.plain for client in drained_clients)


def test_lower_priority_numbers_start_first() -> None:
    simulation = Simulation(engine_config(max_num_seqs=1))
    for name, priority in (("late", 1), ("first", -5), ("second", 0), ("third", 0)):
        add(simulation, name, 5, priority=priority)
    chunks = simulation.drain(random.Random(0), 0.6, True)
    ended = [chunk.request_id for chunk in chunks if chunk.finish_reason]
    assert ended == ["first", "second", "third", "late"]


@pytest.mark.parametrize("num_kv_pages", [17, 40])
def test_a_better_request_preempts_only_where_pages_are_short(num_kv_pages: int) -> None:
    config = engine_config(num_drafts=0, max_model_len=64, num_kv_pages=num_kv_pages)
    simulation = Simulation(config)
    rng = random.Random(0)
    add(simulation, "low", (EOS,) * 30, max_tokens=30, priority=1)
    for _ in range(20):
        simulation.submit(rng, 1.0)
        simulation.read()
    add(simulation, "same", PROMPT, max_tokens=4, priority=1)
    simulation.submit(rng, 1.0)
    simulation.read()
    assert simulation.scheduler.stats.preemptions == 0
    add(simulation, "high", (5,) * 31, max_tokens=4)
    simulation.submit(rng, 1.0)
    simulation.read()
    preempted = simulation.scheduler.stats.preemptions
    assert (preempted > 0) == (num_kv_pages == 17)
    assert "high" in [client.id for client in simulation.running]
    drained(simulation)


def test_a_better_request_waits_for_a_slot() -> None:
    simulation = Simulation(engine_config(max_num_seqs=1))
    add(simulation, "low", 5, max_tokens=20, priority=1)
    simulation.submit(random.Random(0), 1.0)
    add(simulation, "high", 5)
    chunks = simulation.drain(random.Random(0), 0.6, True)
    ended = [chunk.request_id for chunk in chunks if chunk.finish_reason]
    assert ended == ["low", "high"]
    assert simulation.scheduler.stats.preemptions == 0


def test_pages_come_as_a_request_grows() -> None:
    scheduler = Scheduler(engine_config(num_drafts=0, block_size=4))
    scheduler.add(generate_request("a", 7, max_tokens=20))
    first = scheduler.schedule()
    second = scheduler.schedule()
    updates = [(u.first, len(u.pages)) for p in (first, second) for u in p.page_updates]
    # Position 7 still fits into the second page.
    assert updates == [(0, 2)]
    answer(scheduler, first)
    (update,) = scheduler.schedule().page_updates
    assert (update.slot, update.first, len(update.pages)) == (0, 2, 1)


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 2])
def test_a_request_bounds_its_drafts(max_draft_tokens: int) -> None:
    simulation = Simulation(engine_config(num_drafts=3))
    bounded = add(simulation, "bounded", 5, max_tokens=30, max_draft_tokens=max_draft_tokens)
    free = add(simulation, "free", 6, max_tokens=30)
    drained(simulation, acceptance=1.0)
    steps = bounded.verify_steps
    assert bounded.draft_tokens <= max_draft_tokens * steps
    assert (bounded.draft_tokens > 0) == (max_draft_tokens > 0)
    assert free.draft_tokens > 2 * free.verify_steps


def test_where_nobody_drafts_the_drafter_is_left_out() -> None:
    scheduler = Scheduler(engine_config(num_drafts=3))
    scheduler.add(generate_request("a", max_tokens=20, max_draft_tokens=0))
    for plan in (scheduler.schedule(), scheduler.schedule()):
        assert plan.bucket is not None
        assert plan.bucket.num_drafts == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_past_the_positions_of_the_drafter_requests_go_on_without(ahead: bool) -> None:
    simulation = Simulation(engine_config(num_drafts=3, drafter_positions=30))
    rng = random.Random(0)
    inside = add(simulation, "inside", 5, max_tokens=50)
    behind = add(simulation, "behind", 40, max_tokens=20)
    lasts = []
    while simulation.scheduler.has_work:
        plan = simulation.submit(rng, 1.0)
        lasts += [row.position for row in plan.decode if row.num_drafts]
        while simulation.unread and (plan.bucket is None or len(simulation.unread) > ahead):
            simulation.read()
    assert inside.seen == inside.plain
    assert behind.seen == behind.plain
    assert behind.draft_tokens == 0
    # A block of four from position 26 on is the last; it may not be reached exactly.
    assert 20 < max(lasts) <= 26


@pytest.mark.parametrize("num_positions", [2, 3, 4])
def test_a_drafter_of_too_few_positions_is_of_no_use_and_no_harm(num_positions: int) -> None:
    simulation = Simulation(engine_config(num_drafts=3, drafter_positions=num_positions))
    client = add(simulation, "a", 5, max_tokens=20)
    drained(simulation)
    assert client.draft_tokens == 0
