"""What min-p, top-k and top-p leave, against loops over pairs of tokens, on any number of ranks."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers import LMHead
from models.truncation import kept, limbs
from tests.unit.models.draws import kept_tokens
from tests.unit.models.ranks import run_heads

SIZES = (1, 2, 3)


def floats(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def keep(
    distances: Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    operands: list[Tensor] | None = None,
) -> list[list[bool]]:
    """`kept` on one rank, after a check that it is the same on several."""
    vocab_size = distances.shape[1]
    limits = torch.tensor(top_k, dtype=torch.int32), floats(top_p), floats(min_p)

    def work(negative: Tensor, head: LMHead) -> Tensor:
        return kept(-negative, *limits, head.tp)

    ((expected),) = run_heads(-distances, 1, work)
    for size in SIZES[1:]:
        found = torch.cat(run_heads(-distances, size, work, operands), dim=1)
        assert torch.equal(found[:, :vocab_size], expected)
    result: list[list[bool]] = expected.tolist()
    return result


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), vocab_size=st.integers(1, 9))
def test_cuts_equal_loops(seed: int, rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    # Few values, so that tokens tie at a cut.
    values = rng.choice([[0.0, 0.5, 1.0, 2.5, 30.0, math.inf], [rng.expovariate(0.5)] * 3 + [1.0]])
    if rng.random() < 0.3:
        values = [rng.expovariate(0.3) for _ in range(20)]
    table = [rng.choices(values, k=vocab_size) for _ in range(rows)]
    for row in table:
        row[rng.randrange(vocab_size)] = 0.0
    distances = floats(table)
    top_k = rng.choices([0, 1, 2, 3, vocab_size, 1000], k=rows)
    top_p = rng.choices([0.0, 1e-6, 0.3, 0.5, 0.9, 0.999999, 1.0], k=rows)
    min_p = rng.choices([0.0, 0.0, 1e-4, 0.3, 0.7, 1.0], k=rows)

    expected = [
        kept_tokens(row, k, float(floats([p])), float(floats([m])))
        for row, k, p, m in zip(distances.tolist(), top_k, top_p, min_p, strict=True)
    ]
    assert keep(distances, top_k, top_p, min_p) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (0, 1.0, 0.0, "1111"),
        (1, 1.0, 0.0, "1000"),
        (2, 1.0, 0.0, "1110"),  # the second and the third are equal
        (3, 1.0, 0.0, "1110"),
        (4, 1.0, 0.0, "1111"),
        (0, 0.47, 0.0, "1000"),
        (0, 0.48, 0.0, "1110"),
        (0, 0.94, 0.0, "1110"),
        (0, 0.95, 0.0, "1111"),
        (0, 1.0, 0.49, "1110"),
        (0, 1.0, 0.51, "1000"),
        (3, 0.49, 0.0, "1000"),  # the first is half of what top-k leaves
        (0, 0.49, 0.3, "1000"),
        (0, 0.51, 0.3, "1110"),
        (0, 0.0, 0.0, "1000"),
    ],
)
def test_cuts_by_hand(top_k: int, top_p: float, min_p: float, expected: str) -> None:
    probabilities = torch.tensor([[8.0, 4.0, 4.0, 1.0]]) / 17
    distances = probabilities.max().log() - probabilities.log()
    found = keep(distances, [top_k], [top_p], [min_p])
    assert ["".join("01"[bit] for bit in row) for row in found] == [expected]


def test_cuts_of_many_tokens_equal_loops() -> None:
    """Masses whose lower digits carry."""
    generator = torch.Generator().manual_seed(0)
    for low in (0.0, 4.0, 9.0):
        distances = low + torch.rand(3, 400, generator=generator)
        distances[:, 17] = 0.0
        expected = [kept_tokens(row, 0, float(floats([0.7])), 0.0) for row in distances.tolist()]
        assert keep(distances, [0] * 3, [0.7] * 3, [0.0] * 3) == expected


def test_a_token_whose_predecessors_hold_exactly_top_p_goes() -> None:
    distances = floats([[0.0, 1e-9, 2e-9, 3e-9]])
    for top_p, expected in ((0.25, 1), (0.5, 2), (0.75, 3), (0.750001, 4)):
        assert sum(keep(distances, [0], [top_p], [0.0])[0]) == expected


def test_a_row_without_any_token_keeps_none() -> None:
    """Its distances are those of -inf from -inf."""
    for how in ([0], [1.0], [0.0]), ([2], [0.5], [0.1]):
        assert keep(torch.full((1, 5), math.nan), *how) == [[False] * 5]


def test_equals_at_a_cut_all_stay() -> None:
    assert keep(torch.zeros(1, 7), [3], [0.2], [1.0]) == [[True] * 7]


def test_top_p_1_keeps_tokens_too_light_to_be_counted() -> None:
    distances = floats([[0.0, 40.0, 80.0, 200.0]])
    assert keep(distances, [0], [1.0], [0.0]) == [[True] * 4]
    assert keep(distances, [0], [1 - 2**-24], [0.0]) == [[True, False, False, False]]


def test_a_large_vocabulary_does_not_overflow() -> None:
    """Every digit of every token is as large as it can be."""
    count = 1 << 18
    halves = torch.arange(count) < count // 2
    for light in (0.0, 2**-25):
        distances = torch.where(halves, 0.0, light).unsqueeze(0)
        assert sum(keep(distances, [0], [0.9999999], [0.0])[0]) == count
        expected = count if light == 0 else count // 2
        assert sum(keep(distances, [0], [0.4999], [0.0])[0]) == expected


def test_the_mass_of_a_flat_tail_is_counted() -> None:
    """It holds as much as the best token, 2**-16 each; a sum of floats would do here as well."""
    distances = torch.full((1, (1 << 16) + 1), 16 * math.log(2))
    distances[0, 0] = 0.0
    tail = 1 << 16
    for top_p, expected in ((0.499, 1), (0.501, 1 + tail)):
        assert sum(keep(distances, [0], [top_p], [0.0])[0]) == expected


def test_no_operand_has_vocabulary_columns() -> None:
    operands: list[Tensor] = []
    keep(torch.rand(3, 1000), [5] * 3, [0.5] * 3, [0.1] * 3, operands)
    assert operands
    assert max(operand.numel() for operand in operands) <= 6


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
def test_digits_are_those_of_the_numbers(values: list[float]) -> None:
    digits = limbs(floats([values]), 3)
    assert digits.dtype == torch.int32
    for i, value in enumerate(values):
        whole = int(value * 2**38)
        assert digits[:, 0, i].tolist() == [whole >> 26, whole >> 13 & 8191, whole & 8191]
    assert torch.equal(limbs(floats([values]), 2), digits[:2])
