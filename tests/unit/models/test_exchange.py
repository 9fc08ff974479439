"""Exchanges over gloo, between threads."""

import time

import pytest
import torch

from models.drafting import DraftInputs
from models.exchange import Exchange, ExchangeShape, join_exchange
from models.parallel import TensorParallel
from tests.unit.models.exchanges import HOST, Join, Meeting, run_both
from tests.unit.models.ranks import ONE
from tests.unit.models.test_drafting import draft_inputs

# (tokens, width, emitting rows, block): slices that are even, odd, empty; nothing emits.
SIZES = [(4, 6, 2, 5), (3, 5, 1, 3), (1, 1, 1, 2), (7, 3, 0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_drafters", [1, 2])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_what_is_sent_arrives(num_targets: int, num_drafters: int, dtype: torch.dtype) -> None:
    """All ranks of a target send the same; all drafters get it, all get the same drafts."""
    sent = []
    for i, sizes in enumerate(SIZES):
        made = draft_inputs(*sizes, seed=i)
        sent.append(made._replace(aux=made.aux.to(dtype)))
    drafts = [torch.arange(2 * i, dtype=torch.int32).view(2, i) + i for i in (1, 3)]

    def target(tp: TensorParallel, join: Join) -> list[torch.Tensor]:
        exchange = join()
        for inputs in sent:
            exchange.send(inputs)
        back = []
        for expected in drafts:
            shape = ExchangeShape(1, 1, *(2, 4), expected.shape[1], dtype)
            back.append(exchange.receive_back(shape))
        return back

    def drafter(tp: TensorParallel, join: Join) -> list[DraftInputs]:
        exchange = join()
        got = [exchange.receive(ExchangeShape.of(inputs, 1)) for inputs in sent]
        for each in drafts:
            # Only the first of them has anything to say.
            exchange.send_back(each if tp.rank == 0 else torch.zeros_like(each))
        return got

    backs, gots = run_both(Meeting(num_targets, num_drafters), target, drafter)
    for back in backs:
        assert [each.tolist() for each in back] == [each.tolist() for each in drafts]
        assert {each.dtype for each in back} == {torch.int32}
    for got in gots:
        for mine, theirs in zip(got, sent, strict=True):
            assert mine.aux.dtype == dtype
            assert torch.equal(mine.aux, theirs.aux)
            assert torch.equal(mine.packed(), theirs.packed())


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_who_leaves_ends_the_waiting_of_all_others_at_once(who: str) -> None:
    inputs = draft_inputs(4, 6, 2, 5, seed=0)
    shape = ExchangeShape.of(inputs, 3)

    def leave(exchange: Exchange) -> float:
        time.sleep(0.2)
        exchange.leave()
        with pytest.raises(RuntimeError):
            exchange.send(inputs)
        return 0.0

    def target(tp: TensorParallel, join: Join) -> float:
        exchange, start = join(), time.monotonic()
        if who == "target" and tp.rank == 1:
            return leave(exchange)
        with pytest.raises(RuntimeError):
            exchange.send(inputs)
        exchange.leave()
        return time.monotonic() - start

    def drafter(tp: TensorParallel, join: Join) -> float:
        exchange, start = join(), time.monotonic()
        if who == "drafter" and tp.rank == 0:
            return leave(exchange)
        with pytest.raises(RuntimeError):
            exchange.receive(shape)
        exchange.leave()
        return time.monotonic() - start

    backs, gots = run_both(Meeting(2, 2, timeout_s=20), target, drafter)
    assert max(backs + gots) < 5


def test_nobody_waits_longer_than_the_timeout() -> None:
    inputs = draft_inputs(4, 6, 2, 5, seed=0)

    def target(tp: TensorParallel, join: Join) -> float:
        exchange, start = join(), time.monotonic()
        with pytest.raises(RuntimeError):
            exchange.send(inputs)
        return time.monotonic() - start

    def drafter(tp: TensorParallel, join: Join) -> Exchange:
        exchange = join()
        time.sleep(3)
        return exchange

    waited, _ = run_both(Meeting(1, 1, timeout_s=1), target, drafter)
    assert 0.5 < waited[0] < 2.5


def test_an_exchange_that_not_all_come_to_is_refused_in_time() -> None:
    meeting, start = Meeting(1, 2, timeout_s=1), time.monotonic()
    with pytest.raises(RuntimeError):
        meeting.join(ONE.rank)
    assert time.monotonic() - start < 5
    del meeting.store
    with pytest.raises(RuntimeError):
        join_exchange(meeting.address, HOST, 0, 1, 2, timeout_s=1)
