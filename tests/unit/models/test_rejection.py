"""Acceptance against a loop over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.rejection import accept, count_valid

VOCAB = 4


def accept_slowly(target_ids: list[int], drafts: list[int]) -> list[int]:
    emitted = [target_ids[0]]
    for draft, following in zip(drafts, target_ids[1:], strict=True):
        if draft != emitted[-1]:
            break
        emitted.append(following)
    return emitted + [-1] * (len(target_ids) - len(emitted))


@st.composite
def verifications(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Target ids `[rows, k + 1]` and drafts `[rows, k]`, of so few ids that many agree."""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(0, 5))

    def grid(low: int, width: int) -> list[list[int]]:
        ids = st.lists(st.integers(low, VOCAB - 1), min_size=width, max_size=width)
        return draw(st.lists(ids, min_size=rows, max_size=rows))

    return grid(0, k + 1), grid(-1, k)


@given(verifications())
def test_accept_equals_a_loop(case: tuple[list[list[int]], list[list[int]]]) -> None:
    target_ids, drafts = case
    emitted = accept(
        torch.tensor(target_ids, dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32).view(len(drafts), -1),
    )
    assert emitted.dtype == torch.int32
    assert emitted.tolist() == [
        accept_slowly(t, d) for t, d in zip(target_ids, drafts, strict=True)
    ]


@pytest.mark.parametrize(
    ("target_ids", "drafts", "emitted"),
    [
        ([7], [], [7]),
        ([1, 2, 3], [1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 9], [1, 2, -1]),
        ([1, 2, 3], [9, 2], [1, -1, -1]),
        ([1, 2, 3], [1, -1], [1, 2, -1]),
        ([1, 2, 3], [-1, -1], [1, -1, -1]),
        ([-1, -1, -1], [-1, -1], [-1, -1, -1]),
    ],
)
def test_accept(target_ids: list[int], drafts: list[int], emitted: list[int]) -> None:
    found = accept(
        torch.tensor([target_ids], dtype=torch.int32), torch.tensor([drafts], dtype=torch.int32)
    )
    assert found.tolist() == [emitted]


@given(st.lists(st.lists(st.integers(-2, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_count_valid_equals_a_loop(rows: list[list[int]]) -> None:
    counts = count_valid(torch.tensor(rows, dtype=torch.int32), vocab_size=6)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [sum(0 <= token < 6 for token in row) for row in rows]
