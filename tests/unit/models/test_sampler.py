"""Greedy choice over a sharded vocabulary against a scan for the first maximum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.layers import LMHead
from models.parallel import TensorParallel
from models.sampler import greedy
from tests.unit.models.ranks import TORCH, run_ranks


def first_maximum(row: list[float]) -> int:
    best = 0
    for token, value in enumerate(row):
        if value > row[best]:
            best = token
    return best


def choose(logits: Tensor, size: int, operands: list[Tensor] | None = None) -> list[Tensor]:
    """The choice of every rank, each given its columns of `logits [rows, vocab]`."""
    vocab_size = logits.shape[1]
    width = -(-vocab_size // size)
    padded = torch.full((logits.shape[0], width * size), float("-inf"))
    padded[:, :vocab_size] = logits

    def work(tp: TensorParallel) -> Tensor:
        head = LMHead(torch.zeros(width, 1), vocab_size, tp, TORCH)
        return greedy(padded[:, tp.rank * width : (tp.rank + 1) * width], head)

    return run_ranks(size, work, operands)


# Few values, so that maxima tie, within a shard and across shards.
values = st.sampled_from([-3.0, 0.0, 1.5, 2.0])


@given(data=st.data(), vocab_size=st.integers(1, 9), size=st.integers(1, 4))
def test_ties_go_to_the_lowest_id_on_every_rank(
    data: st.DataObject, vocab_size: int, size: int
) -> None:
    row = st.lists(values, min_size=vocab_size, max_size=vocab_size)
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    expected = [first_maximum(row) for row in rows]
    for found in choose(torch.tensor(rows), size):
        assert found.dtype == torch.int32
        assert found.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_logits_everywhere_give_token_zero(size: int) -> None:
    assert choose(torch.zeros(2, 7), size)[0].tolist() == [0, 0]


def test_only_one_value_and_one_id_a_row_cross_ranks() -> None:
    operands: list[Tensor] = []
    choose(torch.randn(5, 12), 3, operands)
    assert {tuple(operand.shape) for operand in operands} == {(1, 5)}
