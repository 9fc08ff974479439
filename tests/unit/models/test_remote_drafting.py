"""Target ranks beside drafters on ranks of their own: the same steps, and what a loss leaves."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafting import DrafterRank
from models.exchange import Exchange, ExchangeShape
from models.parallel import TensorParallel
from models.remote_drafting import RemoteDrafting
from models.rows import StepInputs
from models.steps import ModelRank
from tests.unit.models.conftest import PROMPT, Pair, PairMaker
from tests.unit.models.exchanges import (
    Join,
    Meeting,
    SpyGroup,
    Wrap,
    load_drafting,
    load_target_only,
    run_both,
)
from tests.unit.models.ranks import load_model_rank, run_ranks
from tests.unit.models.test_drafting import drafter_pools, script, state_of
from tests.unit.models.test_steps import (
    OTHER_PROMPT,
    PAGE,
    Decode,
    K,
    Prefill,
    drafts_in,
    emitted,
    inputs,
    trace_of,
)

VOCAB = 300


def step_of(
    model: ModelRank, remote: RemoteDrafting, step: StepInputs
) -> tuple[list[list[int]], Tensor | None]:
    """What the step emits, and its drafts."""
    result, left = model.verify(step)
    rows = emitted(result)
    return rows, remote.draft(left, step.num_drafts)


def shape_of(drafting: DrafterRank, step: StepInputs) -> ExchangeShape:
    config = drafting.drafter.config
    return ExchangeShape(
        num_tokens=step.num_tokens,
        width=len(config.capture_layer_ids) * config.target_hidden_size,
        emitting_rows=step.emitting.shape[0],
        block=config.block_size,
        num_drafts=step.num_drafts,
        dtype=torch.float32,
    )


def draft_step(drafting: DrafterRank, exchange: Exchange, step: StepInputs) -> None:
    """A drafter rank's part of a step."""
    inputs = exchange.receive(shape_of(drafting, step))
    proposed = drafting.draft(inputs, step.num_drafts, step.context_pages)
    if proposed is not None:
        exchange.send_back(proposed[1])


def close_to(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        # The null page is nobody's.
        torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_drafters", [1, 2])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_dedicated_steps_are_as_colocated_ones(
    trained: PairMaker, num_targets: int, num_drafters: int
) -> None:
    """What is emitted and drafted, the slots' state, the drafter's KV; no collective of any group
    sees the vocabulary."""
    pair = trained("qwen3")

    def beside(tp: TensorParallel) -> tuple[list[Any], list[Tensor]]:
        model = load_model_rank(*pair, tp=tp, page_size=PAGE)
        rows = [(emitted(model.step(step)), state_of(model)["drafts"].clone()) for step in script()]
        return rows, drafter_pools(model.drafting)

    expected = run_ranks(num_drafters, beside)

    def target(tp: TensorParallel, join: Join) -> tuple[list[Any], dict[str, Tensor]]:
        model = load_target_only(pair, tp, PAGE)
        remote = RemoteDrafting(model, tp)
        assert remote.is_lost
        remote.join(join())
        rows = []
        for step in script():
            found, drafts = step_of(model, remote, step)
            assert not remote.is_lost
            assert (drafts is None) == (step.num_drafts == 0)
            rows.append((found, state_of(model)["drafts"].clone()))
        return rows, state_of(model)

    def drafter(tp: TensorParallel, join: Join) -> list[Tensor]:
        drafting = load_drafting(pair, tp, page_size=PAGE)
        exchange = join()
        for step in script():
            draft_step(drafting, exchange, step)
        return drafter_pools(drafting)

    operands: list[Tensor] = []
    exchanged: list[Tensor] = []
    targets, drafters = run_both(
        Meeting(num_targets, num_drafters),
        target,
        drafter,
        operands,
        wrap=lambda group, rank: SpyGroup(group, exchanged),
    )
    for rows, state in targets:
        for (found, drafts), (wanted, wanted_drafts) in zip(rows, expected[0][0], strict=True):
            assert found == wanted
            # Padded rows scribble on the last slot.
            assert drafts[:-1].tolist() == wanted_drafts[:-1].tolist()
        for name, value in state.items():
            assert value[:-1].tolist() == targets[0][1][name][:-1].tolist()
    for mine, (_, theirs) in zip(drafters, expected, strict=True):
        close_to(mine, theirs)

    assert exchanged
    assert bool(operands) == (num_targets + num_drafters > 2)
    columns = {-(-VOCAB // size) for size in (1, num_targets, num_drafters)}
    for operand in (*operands, *exchanged):
        assert columns.isdisjoint(operand.shape), operand.shape


# --------------------------------------------------------------------------------------- losses


@dataclass
class Loss:
    """Where in its second step a drafter rank fails, and how; `rank` does, all if it is None."""

    where: str  # "receive" (before it), "draft" (before it), "send" (before it), "end" (behind it)
    how: str  # "leave": its process is gone; "silence": it never answers
    rank: int | None = None


PLACES = ("receive", "draft", "send", "end")


def failing_step(drafting: DrafterRank, exchange: Exchange, step: StepInputs, loss: Loss) -> None:
    """`draft_step` that ends at one of `PLACES`."""
    if loss.where != "receive":
        left = exchange.receive(shape_of(drafting, step))
        if loss.where != "draft":
            proposed = drafting.draft(left, step.num_drafts, step.context_pages)
            assert proposed is not None
            if loss.where != "send":
                exchange.send_back(proposed[1])


def lost_drafters(
    pair: Pair, num_targets: int, num_drafters: int, loss: Loss, timeout_s: float
) -> list[tuple[Any, ...]]:
    """What target ranks saw who lose their drafters in the second of four steps, and get others
    behind these; one entry per rank, how long it waited last."""
    meeting, again = Meeting(num_targets, num_drafters, timeout_s), Meeting(num_targets, 1)
    steps = [
        inputs(prefill=[Prefill(0, PROMPT), Prefill(1, OTHER_PROMPT)]),
        inputs([Decode(0, len(PROMPT))], padding=1),
    ]

    def target(tp: TensorParallel, join: Join) -> tuple[Any, ...]:
        model = load_target_only(pair, tp, PAGE)
        remote = RemoteDrafting(model, tp)
        remote.join(join())
        seen: list[Any] = []
        (first, _), drafts = step_of(model, remote, steps[0])
        assert drafts is not None
        start, waited = len(PROMPT), 0.0
        tokens = list(first)
        for number in range(3):
            began = time.monotonic()
            step = inputs([Decode(0, start)], padding=1)
            (rows, *_), drafts = step_of(model, remote, step)
            waited = max(waited, time.monotonic() - began)
            tokens += rows
            start += len(rows)
            is_lost = number > 0 or loss.where != "end"
            assert remote.is_lost == is_lost
            assert (drafts is None) == is_lost
            assert (drafts_in(model, 0) == []) == is_lost, "drafts that nobody proposed"
            seen.append((rows, state_of(model)["drafts"].tolist()))
        seen.append({name: value.tolist() for name, value in state_of(model).items()})

        remote.join(again.join(tp.rank))
        assert not remote.is_lost
        (rows,), drafts = step_of(model, remote, inputs(prefill=[Prefill(2, PROMPT)]))
        assert drafts is not None
        assert rows == tokens[:1]
        return tokens, seen, drafts_in(model, 2), waited

    def drafter(tp: TensorParallel, join: Join) -> None:
        drafting = load_drafting(pair, tp, page_size=PAGE)
        exchange = join()
        draft_step(drafting, exchange, steps[0])
        if loss.rank in (None, tp.rank):
            failing_step(drafting, exchange, steps[1], loss)
            if loss.how == "silence":
                time.sleep(timeout_s + 1)
        else:
            with suppress(RuntimeError):
                draft_step(drafting, exchange, steps[1])
        exchange.leave()
        if tp.rank == 0:
            fresh = load_drafting(pair, page_size=PAGE)
            step = inputs(prefill=[Prefill(2, PROMPT)])
            draft_step(fresh, again.join(num_targets), step)

    found, _ = run_both(meeting, target, drafter)
    return found


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("num_targets", [1, 2])
def test_a_drafter_that_is_gone_costs_drafts_only(
    trained: PairMaker, num_targets: int, where: str
) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    found = lost_drafters(pair, num_targets, 1, Loss(where, "leave"), timeout_s=20)
    for tokens, seen, again, waited in found:
        assert tokens == trace.token_ids[: len(tokens)]
        assert seen == found[0][1], "ranks differ"
        assert again == trace.steps[0].drafts, "others draft as if nothing had been"
        assert waited < 5


@pytest.mark.parametrize("where", ["receive", "send"])
def test_one_of_two_drafter_ranks_that_is_gone_is_the_loss_of_both(
    trained: PairMaker, where: str
) -> None:
    """The gather needs all of them. Behind it only the first one's drafts are waited for."""
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    for rank in (0, 1) if where == "receive" else (0,):
        found = lost_drafters(pair, 2, 2, Loss(where, "leave", rank), timeout_s=20)
        for tokens, seen, again, waited in found:
            assert tokens == trace.token_ids[: len(tokens)]
            assert seen == found[0][1]
            assert again == trace.steps[0].drafts
            assert waited < 5


@pytest.mark.parametrize("where", ["receive", "draft"])
def test_a_drafter_that_never_answers_is_waited_for_so_long(trained: PairMaker, where: str) -> None:
    pair = trained("qwen3")
    trace = trace_of(pair, PROMPT)
    found = lost_drafters(pair, 2, 1, Loss(where, "silence"), timeout_s=2)
    for tokens, seen, again, waited in found:
        assert tokens == trace.token_ids[: len(tokens)]
        assert seen == found[0][1]
        assert again == trace.steps[0].drafts
        assert 1 < waited < 6


@pytest.mark.parametrize("collective", range(3))
@pytest.mark.parametrize("num_targets", [2, 3])
def test_ranks_agree_where_only_one_of_them_failed(
    trained: PairMaker, num_targets: int, collective: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gather, the inputs or the drafts have reached all others: they drop them too."""
    # A record that is kept keeps the error, and that the frames that hold the group.
    monkeypatch.setattr(logging.getLogger("models.remote_drafting"), "disabled", True)
    pair = trained("qwen3")
    failing = num_targets - 1

    def fail(rank: int, number: int) -> None:
        if rank == failing and number == collective:
            raise RuntimeError("the connection is gone")

    wrap: Wrap = lambda group, rank: SpyGroup(group, [], partial(fail, rank))  # noqa: E731

    def target(tp: TensorParallel, join: Join) -> tuple[Any, ...]:
        model = load_target_only(pair, tp, PAGE)
        remote = RemoteDrafting(model, tp)
        remote.join(join())
        first, drafts = step_of(model, remote, inputs(prefill=[Prefill(0, PROMPT)]))
        assert remote.is_lost
        assert drafts is None
        assert drafts_in(model, 0) == []
        second, _ = step_of(model, remote, inputs([Decode(0, len(PROMPT))]))
        return first + second, {name: value.tolist() for name, value in state_of(model).items()}

    def drafter(tp: TensorParallel, join: Join) -> None:
        drafting = load_drafting(pair, tp, page_size=PAGE)
        exchange = join()
        try:
            step = inputs(prefill=[Prefill(0, PROMPT)])
            draft_step(drafting, exchange, step)
        except RuntimeError:
            exchange.leave()

    targets, _ = run_both(Meeting(num_targets, 1, timeout_s=20), target, drafter, wrap=wrap)
    trace = trace_of(pair, PROMPT)
    assert [rows for rows, _ in targets] == [
        [[token] for token in trace.token_ids[:2]]
    ] * num_targets
    assert all(state == targets[0][1] for _, state in targets)


def test_ranks_that_leave_go_on_plainly(trained: PairMaker) -> None:
    pair = trained("qwen3")

    def target(tp: TensorParallel, join: Join) -> list[list[int]]:
        model = load_target_only(pair, tp, PAGE)
        remote = RemoteDrafting(model, tp)
        remote.join(join())
        remote.leave()
        remote.leave()
        assert remote.is_lost
        rows, drafts = step_of(model, remote, inputs(prefill=[Prefill(0, PROMPT)]))
        assert drafts is None
        for _ in range(2):
            row = Decode(0, len(PROMPT) + len(rows) - 1)
            more, _ = step_of(model, remote, inputs([row]))
            rows += more
        return rows

    def drafter(tp: TensorParallel, join: Join) -> None:
        with pytest.raises(RuntimeError):
            join().receive(ExchangeShape(1, 1, 0, K + 1, 0, torch.float32))

    targets, _ = run_both(Meeting(2, 1), target, drafter)
    expected = [[token] for token in trace_of(pair, PROMPT).token_ids[:3]]
    assert targets == [expected] * 2


def test_deferred_drafts_come_with_the_next_step(trained: PairMaker) -> None:
    """Slots have none until then; what has emitted meanwhile keeps its own."""
    pair = trained("qwen3")
    first = inputs([], [Prefill(0, PROMPT)])
    second = inputs([], [Prefill(1, OTHER_PROMPT)])
    again = inputs([Decode(0, len(PROMPT), num_drafts=0)])
    alone = load_model_rank(*pair, page_size=PAGE)
    alone.step(first)
    expected = drafts_in(alone, 0)
    alone.step(again)
    newer = drafts_in(alone, 0)
    assert expected != newer

    def target(tp: TensorParallel, join: Join) -> list[Any]:
        model = load_target_only(pair, tp, PAGE)
        remote = RemoteDrafting(model, tp)
        remote.join(join())
        found: list[Any] = []
        for step, defer in ((first, True), (second, True), (first, True), (again, False)):
            _, left = model.verify(step)
            assert (remote.draft(left, step.num_drafts, defer=defer) is None) == defer
            found.append((int(model.state.num_drafts[0]), drafts_in(model, 0)))
        return found

    def drafter(tp: TensorParallel, join: Join) -> None:
        drafting = load_drafting(pair, tp, page_size=PAGE)
        exchange, deferred = join(), None
        for step, defer in ((first, True), (second, True), (first, True), (again, False)):
            left = exchange.receive(shape_of(drafting, step))
            if deferred is not None:
                exchange.send_back(deferred)
            proposed = drafting.draft(left, step.num_drafts, step.context_pages)
            assert proposed is not None
            deferred = proposed[1] if defer else exchange.send_back(proposed[1])

    (found,), _ = run_both(Meeting(1, 1), target, drafter)
    assert [count for count, _ in found] == [0, K, 0, K]
    assert found[1][1] == expected
    assert found[3][1] == newer
