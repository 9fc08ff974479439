"""The noise: its bits against integers of any size, and its quality as random numbers."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.noise import gumbel, uniform
from tests.unit.models.draws import chi_square, noise, noise_bits, random_seeds

words = st.integers(-(2**31), 2**31 - 1)
COUNT = 1 << 17
CELLS = 256
# Of all tests here together, one in a hundred would fail by chance, were the seeds not fixed.
LEAST_P = 0.01 / 40


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(low=words, high=words, position=words, ids=st.lists(words, min_size=1, max_size=20))
def test_numbers_equal_the_integer_hash(low: int, high: int, position: int, ids: list[int]) -> None:
    found = uniform(ints([low, high]).view(1, 2), ints([position]), ints(ids))
    bits = [noise_bits(low, high, position, token) for token in ids]
    exact = torch.tensor([(b + 0.5) / 2**32 for b in bits], dtype=torch.float64)
    assert torch.equal(found[0], exact.float().clamp(max=1 - 2**-24))
    expected = [noise([low, high], position, token) for token in ids]
    assert gumbel(ints([low, high]).view(1, 2), ints([position]), ints(ids))[
        0
    ].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_noise_stays_what_it_was() -> None:
    """A seed must give the same tokens tomorrow."""
    found = uniform(ints([1, 0, 0, 1]).view(2, 2), ints([0, 7]), ints([0, 1, 49151]))
    assert (found * 2**24).int().tolist() == [
        [13390749, 5577223, 5819305],
        [4094677, 9423302, 10716946],
    ]


def test_numbers_lie_in_the_open_interval() -> None:
    for position in range(8):
        numbers = uniform(random_seeds(64), ints([position] * 64), ints(list(range(1 << 15))))
        assert numbers.min() > 0
        assert numbers.max() < 1
        assert gumbel(random_seeds(64), ints([position] * 64), ints([*range(99)])).isfinite().all()


def test_noise_is_the_same_for_any_rows_and_ids() -> None:
    seeds, positions, ids = random_seeds(9), ints(list(range(9))), ints(list(range(1000)))
    whole = gumbel(seeds, positions, ids)
    for row in range(9):
        assert torch.equal(gumbel(seeds[[row]], positions[[row]], ids), whole[[row]])
    for start, stop in ((0, 1), (1, 2), (3, 500), (500, 1000), (993, 1000)):
        assert torch.equal(gumbel(seeds, positions, ids[start:stop]), whole[:, start:stop])


# ---------------------------------------------------------------------------------------- quality


def along_ids() -> Tensor:
    return uniform(ints([0, 0]).view(1, 2), ints([0]), torch.arange(COUNT, dtype=torch.int32))[0]


def along_positions() -> Tensor:
    positions = torch.arange(COUNT, dtype=torch.int32)
    return uniform(torch.zeros(COUNT, 2, dtype=torch.int32), positions, ints([5]))[:, 0]


def along_low_seeds() -> Tensor:
    seeds = torch.zeros(COUNT, 2, dtype=torch.int32)
    seeds[:, 0] = torch.arange(COUNT)
    return uniform(seeds, torch.full((COUNT,), 3, dtype=torch.int32), ints([0]))[:, 0]


def along_high_seeds() -> Tensor:
    seeds = torch.zeros(COUNT, 2, dtype=torch.int32)
    seeds[:, 1] = torch.arange(COUNT)
    return uniform(seeds, torch.full((COUNT,), 3, dtype=torch.int32), ints([0]))[:, 0]


def along_rows() -> Tensor:
    """Of a step: ids within positions, as a block of drafts has them."""
    ids = torch.arange(COUNT // 16, dtype=torch.int32)
    return uniform(torch.zeros(16, 2, dtype=torch.int32), ints([*range(16)]), ids).T.flatten()


SEQUENCES = [along_ids, along_positions, along_low_seeds, along_high_seeds, along_rows]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_numbers_are_uniform(sequence: Callable[[], Tensor]) -> None:
    numbers = sequence()
    even = torch.full((CELLS,), 1 / CELLS)
    # The leading bits, and those behind them.
    for scale in (1, CELLS):
        cells = ((numbers.double() * scale % 1) * CELLS).long()
        assert chi_square(cells.bincount(minlength=CELLS), even) > LEAST_P


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_independent(sequence: Callable[[], Tensor], lag: int) -> None:
    numbers = sequence().double()
    side = 16
    cells = (numbers[:-lag] * side).long() * side + (numbers[lag:] * side).long()
    even = torch.full((side * side,), 1 / side**2)
    assert chi_square(cells.bincount(minlength=side * side), even) > LEAST_P
    assert torch.corrcoef(torch.stack([numbers[:-lag], numbers[lag:]]))[0, 1].abs() < 0.015


def test_ids_of_neighbouring_positions_are_not_the_same_numbers_shifted() -> None:
    ids = torch.arange(COUNT // 2, dtype=torch.int32)
    first, second = uniform(torch.zeros(2, 2, dtype=torch.int32), ints([0, 1]), ids).double()
    for shift in range(-8, 9):
        pairs = torch.stack([first[8:-8], second.roll(shift)[8:-8]])
        assert torch.corrcoef(pairs)[0, 1].abs() < 0.02


def test_a_changed_bit_of_any_argument_changes_every_bit_half_the_time() -> None:
    count = 1 << 14
    low, high = random_seeds(count, seed=1).unbind(1)
    positions = random_seeds(count, seed=2)[:, 0]

    def bits(low: Tensor, high: Tensor, positions: Tensor, token: Tensor) -> Tensor:
        return (uniform(torch.stack([low, high], 1), positions, token)[:, 0] * 2**24).int()

    arguments = [low, high, positions, ints([77])]
    plain, places = bits(*arguments), torch.arange(24)
    for which in range(4):
        for bit in range(32):
            flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
            changed = bits(*(a ^ flip if i == which else a for i, a in enumerate(arguments)))
            share = (((changed ^ plain).unsqueeze(1) >> places) & 1).double().mean(0)
            assert (share - 0.5).abs().max() < 0.025, (which, bit)


def test_the_tail_is_that_of_the_gumbel_distribution() -> None:
    values = gumbel(random_seeds(512), ints([3] * 512), ints(list(range(1 << 14))))
    for bound in (9.0, 11.0, 13.0):
        expected = values.numel() * -math.expm1(-math.exp(-bound))
        assert abs(int((values > bound).sum()) - expected) < 4 * math.sqrt(expected), bound


def test_the_small_numbers_are_exact() -> None:
    """One of 24 bits would have no noise above 17."""
    seeds, position, rare = torch.zeros(1, 2, dtype=torch.int32), ints([0]), 52703979
    assert noise_bits(0, 0, 0, rare) == 4
    assert uniform(seeds, position, ints([rare])).tolist() == [[4.5 / 2**32]]
    found = float(gumbel(seeds, position, ints([rare])))
    assert found == pytest.approx(-math.log(4.5 / 2**32), rel=1e-6)


def test_the_largest_numbers_are_not_rounded_to_1() -> None:
    seeds, position, rare = torch.zeros(1, 2, dtype=torch.int32), ints([0]), 31559096
    assert noise_bits(0, 0, 0, rare) == 2**32 - 65
    assert uniform(seeds, position, ints([rare])).tolist() == [[1 - 2**-24]]


def test_noise_has_the_mean_and_the_variance_of_the_gumbel_distribution() -> None:
    values = gumbel(random_seeds(64), ints([0] * 64), ints(list(range(1 << 14)))).double()
    assert float(values.mean()) == pytest.approx(0.5772156649, abs=4 * 1.2825 / 1024)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
