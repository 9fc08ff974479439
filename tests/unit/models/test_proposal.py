"""Placement of tokens and blocks against loops over rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from models.proposal import bonus_tokens, paged_slots, prev_rejected, query_blocks

VOCAB = 6
sampled_rows = st.lists(
    st.lists(st.integers(-1, VOCAB + 1), min_size=4, max_size=4), min_size=1, max_size=5
)


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(sampled=sampled_rows, data=st.data())
def test_prev_rejected_equals_a_loop(sampled: list[list[int]], data: st.DataObject) -> None:
    rows = len(sampled)
    num_drafts = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    in_flight = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    expected = []
    for row, drafts, unread in zip(sampled, num_drafts, in_flight, strict=True):
        valid = sum(0 <= token < VOCAB for token in row)
        expected.append(1 + drafts - valid if unread else 0)
    found = prev_rejected(int32(sampled), int32(num_drafts), torch.tensor(in_flight), VOCAB)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_the_identity_of_a_row_without_a_step_before_is_no_correction() -> None:
    prefilled = int32([[5, -1, -1, -1]])
    assert prev_rejected(prefilled, int32([0]), torch.tensor([True]), VOCAB).tolist() == [0]


@given(sampled_rows)
def test_bonus_is_the_last_valid_token(sampled: list[list[int]]) -> None:
    expected = [([-1] + [t for t in row if 0 <= t < VOCAB])[-1] for row in sampled]
    found = bonus_tokens(int32(sampled), VOCAB)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_bonus_of_edge_rows() -> None:
    sampled = [[-1, -1], [VOCAB, -1], [VOCAB - 1, VOCAB], [0, -1], [3, 4]]
    assert bonus_tokens(int32(sampled), VOCAB).tolist() == [-1, -1, VOCAB - 1, 0, 4]


@given(page_size=st.integers(1, 5), num_pages=st.integers(1, 4), data=st.data())
def test_paged_slots_equal_a_loop(page_size: int, num_pages: int, data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    in_range = st.integers(0, num_pages * page_size - 1)
    positions, table, valid, expected = [], [], [], []
    for row in range(rows):
        pages = data.draw(st.permutations(range(1 + row * num_pages, 1 + (row + 1) * num_pages)))
        table.append(list(pages))
        flags = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
        # Padding may sit anywhere, even past the end of its table.
        places = [data.draw(in_range if real else st.integers(0, 30)) for real in flags]
        valid.append(flags)
        positions.append(places)
        expected.append(
            [
                (pages[place // page_size] if real else 0) * page_size + place % page_size
                for place, real in zip(places, flags, strict=True)
            ]
        )
    found = paged_slots(int32(positions), int32(table), torch.tensor(valid), page_size)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_page_edges() -> None:
    positions = int32([[0, 3, 4, 7, 8, 11]])
    slots = paged_slots(positions, int32([[9, 2, 5]]), torch.ones(1, 6, dtype=torch.bool), 4)
    assert slots.tolist() == [[36, 39, 8, 11, 20, 23]]


def test_query_blocks_are_bonus_and_masks() -> None:
    blocks = query_blocks(int32([4, -1, 0]), num_drafts=3, mask_token_id=9)
    assert blocks.dtype == torch.int32
    assert blocks.tolist() == [[4, 9, 9, 9], [0, 9, 9, 9], [0, 9, 9, 9]]
