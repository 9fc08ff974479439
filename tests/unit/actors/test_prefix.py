import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.prefix import HashChain, page_hashes

token_ids = st.integers(0, 3)
page_sizes = st.integers(1, 4)
salts = st.sampled_from(["", "a", "b"])


@given(
    tokens=st.lists(token_ids, max_size=20),
    other=st.lists(token_ids, max_size=20),
    page_size=page_sizes,
    salt=salts,
    other_salt=salts,
)
def test_equal_hashes_are_equal_prefixes_under_one_salt(
    tokens: list[int], other: list[int], page_size: int, salt: str, other_salt: str
) -> None:
    hashes = page_hashes(tokens, page_size, salt)
    others = page_hashes(other, page_size, other_salt)
    assert len(hashes) == len(tokens) // page_size
    for i, page_hash in enumerate(hashes, start=1):
        for j, other_hash in enumerate(others, start=1):
            same = salt == other_salt and tokens[: i * page_size] == other[: j * page_size]
            assert (page_hash == other_hash) == same


@given(
    pieces=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), max_size=9),
    page_size=page_sizes,
)
def test_a_chain_does_not_see_how_its_tokens_were_cut(
    pieces: list[list[int]], page_size: int
) -> None:
    chain = HashChain(page_size, "salt")
    tokens: list[int] = []
    for piece in pieces:
        chain.extend(piece)
        tokens += piece
        assert chain.hashes == page_hashes(tokens, page_size, "salt")


def test_a_partial_page_has_no_hash() -> None:
    full = page_hashes(range(8), 4, "")
    assert page_hashes(range(11), 4, "") == full
    assert page_hashes(range(3), 4, "") == page_hashes([], 4, "") == []


def test_pages_of_equal_tokens_differ_by_what_precedes_them() -> None:
    assert len(set(page_hashes([7] * 400, 4, ""))) == 100


def test_token_ids_are_not_confused_with_their_bytes() -> None:
    tokens = [1, 256, 65536, 16777216]
    assert len({page_hashes([token], 1, "")[0] for token in tokens}) == 4


def test_hashes_are_too_long_for_collisions() -> None:
    assert {len(page_hash) for page_hash in page_hashes(range(64), 4, "")} == {32}


@pytest.mark.parametrize("salt", ["", "\0", "ключ", "\ud800", "x" * 100_000])
def test_any_string_is_a_salt_of_its_own(salt: str) -> None:
    mine, other = page_hashes([1, 2], 1, salt), page_hashes([1, 2], 1, "another")
    assert mine == page_hashes([1, 2], 1, salt)
    assert not set(mine) & set(other)


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1])
def test_a_token_id_is_an_int32(token_id: int) -> None:
    with pytest.raises(OverflowError):
        HashChain(4, "").extend([token_id])
