"""Rows of guided requests; all others are in the tests of the scheduler."""

import pytest

from actors.request import Request
from actors.rows import decode_row, prefill_rows
from tests.unit.actors.builders import generate_request
from tests.unit.actors.fake_grammar import FORBIDDEN, FakeGrammar, masks_behind

PROMPT_LEN = 5


def request(
    *output: int, drafts: tuple[int, ...] = (), max_tokens: int = 20, guided: bool = True
) -> Request:
    """One that runs and has emitted `output`, to which the last row proposed `drafts`."""
    made = Request(
        message=generate_request(prompt=PROMPT_LEN, max_tokens=max_tokens),
        stop_token_ids=frozenset(),
        max_len=PROMPT_LEN + max_tokens,
        max_drafts=4,
        draft_end=100,
        grammar=FakeGrammar() if guided else None,
    )
    made.start(slot=3, pages=[1, 2, 3], num_cached=0)
    made.drafts, made.num_proposed = drafts, len(drafts)
    made.append(output)
    if output:
        made.num_computed = PROMPT_LEN + len(output) - 1
    if made.grammar is not None:
        made.grammar.commit(output)
    return made


@pytest.mark.parametrize(
    ("drafts", "num_drafts"),
    [
        ((), 0),
        ((10, 11, 12, 13), 4),
        ((10, 11, FORBIDDEN, 13), 2),
        ((FORBIDDEN, 11, 12, 13), 0),
        ((10, 11, 12, FORBIDDEN), 3),
    ],
)
def test_a_row_verifies_what_the_grammar_allows(drafts: tuple[int, ...], num_drafts: int) -> None:
    row = decode_row(request(8, 9, drafts=drafts), max_drafts=4)
    assert (row.position, row.num_drafts, row.propose) == (PROMPT_LEN + 1, num_drafts, True)
    assert row.masks == tuple(masks_behind((8, 9), drafts[:num_drafts]))


@pytest.mark.parametrize(
    ("max_drafts", "max_tokens", "num_drafts"), [(2, 20, 2), (0, 20, 0), (4, 5, 2), (4, 3, 0)]
)
def test_the_grammar_is_asked_about_no_more_than_may_be_verified(
    max_drafts: int, max_tokens: int, num_drafts: int
) -> None:
    drafts = (10, 11, 12, 13)
    row = decode_row(request(8, 9, drafts=drafts, max_tokens=max_tokens), max_drafts)
    assert row.num_drafts == num_drafts
    assert row.masks == tuple(masks_behind((8, 9), drafts[:num_drafts]))


def test_a_block_is_drafted_behind_the_drafts_that_are_allowed() -> None:
    guided = request(8, 9, drafts=(10, 11, FORBIDDEN, 13))
    bonus = PROMPT_LEN + 1 + 2 + 1
    for draft_end, propose in ((bonus + 1, True), (bonus, False)):
        guided.draft_end = draft_end
        assert decode_row(guided, max_drafts=4).propose == propose


def test_drafts_of_a_request_that_starts_again_are_gone() -> None:
    guided = request(8, 9, drafts=(10, 11))
    guided.restart()
    guided.start(slot=0, pages=[4, 5], num_cached=0)
    guided.num_computed = guided.prefill_len
    guided.append((14,))
    assert guided.grammar is not None
    guided.grammar.commit((14,))
    row = decode_row(guided, max_drafts=4)
    assert (row.num_drafts, row.masks) == (0, tuple(masks_behind((8, 9, 14))))


@pytest.mark.parametrize("output", [(), (8, 9)])
def test_the_row_that_ends_a_prompt_has_a_mask(output: tuple[int, ...]) -> None:
    guided = request(*output)
    guided.num_computed, guided.prefill_len = 0, guided.num_tokens
    rows = prefill_rows(guided, guided.prefill_len, width=2, max_drafts=4)
    assert [row.last for row in rows] == [False] * (len(rows) - 1) + [True]
    assert [row.masks for row in rows[:-1]] == [()] * (len(rows) - 1)
    assert rows[-1].masks == tuple(masks_behind(output))
    assert all(row.masks == () for row in prefill_rows(guided, 4, width=2, max_drafts=4))


def test_rows_without_a_grammar_have_no_masks() -> None:
    row = decode_row(request(8, 9, drafts=(FORBIDDEN, 11), guided=False), max_drafts=4)
    assert (row.num_drafts, row.masks) == (2, ())
    (only,) = prefill_rows(request(guided=False), PROMPT_LEN, width=8, max_drafts=4)
    assert (only.last, only.masks) == (True, ())
