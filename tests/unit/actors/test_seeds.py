"""Seeds of choices: the first is the request's own, the others look like any other seed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.seeds import choice_seed

LOWEST, HIGHEST = -(2**63), 2**63 - 1
seeds = st.integers(LOWEST, HIGHEST)


@given(seed=seeds)
def test_the_first_choice_has_the_request_s_seed(seed: int) -> None:
    assert choice_seed(seed, 0) == seed


@given(seed=seeds, choice=st.integers(0, 1000))
def test_a_seed_is_a_signed_64_bit_integer(seed: int, choice: int) -> None:
    assert LOWEST <= choice_seed(seed, choice) <= HIGHEST


def test_seeds_stay_what_they_were() -> None:
    """A stored seed must give the same tokens tomorrow."""
    found = [choice_seed(seed, choice) for seed, choice in ((0, 1), (1, 1), (-1, 7), (HIGHEST, 2))]
    assert found == [
        3069472533636442495,
        -8730512010378760701,
        1869568459174662326,
        -1671199578849396968,
    ]


def test_no_two_choices_share_a_seed() -> None:
    near = [*range(-50, 50), LOWEST, LOWEST + 1, HIGHEST - 1, HIGHEST]
    found = [choice_seed(seed, choice) for seed in near for choice in range(50)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("bit", range(64))
def test_a_changed_bit_of_the_seed_changes_half_of_a_choice_s(bit: int) -> None:
    cases = itertools.product(range(100), (1, 2, 3))
    changed = [
        (choice_seed(seed, choice) ^ choice_seed(_flipped(seed, bit), choice)) & (2**64 - 1)
        for seed, choice in cases
    ]
    assert sum(word.bit_count() for word in changed) / len(changed) == pytest.approx(32, abs=1.5)


def test_neighbouring_choices_differ_in_half_of_their_bits() -> None:
    changed = [
        (choice_seed(seed, choice) ^ choice_seed(seed, choice + 1)) & (2**64 - 1)
        for seed in range(100)
        for choice in range(1, 10)
    ]
    assert sum(word.bit_count() for word in changed) / len(changed) == pytest.approx(32, abs=1)


def _flipped(seed: int, bit: int) -> int:
    flipped = (seed ^ (1 << bit)) & (2**64 - 1)
    return flipped - 2**64 if flipped >> 63 else flipped
