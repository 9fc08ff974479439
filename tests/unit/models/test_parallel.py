"""Layouts over ranks: nothing lost, nothing doubled, the same shapes everywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.parallel import (
    HeadLayout,
    Part,
    Piece,
    TensorParallel,
    even_part,
    head_layout,
    head_part,
)
from tests.unit.models.processes import RankProcesses, collectives, free_address
from tests.unit.models.ranks import fake_rank

sizes = st.integers(1, 9)


def layouts(num_heads: int, num_kv_heads: int, size: int) -> list[HeadLayout]:
    return [head_layout(num_heads, num_kv_heads, fake_rank(r, size)) for r in range(size)]


def taken(full: Tensor, part: Part) -> Tensor:
    """A rank's part of the last dimension of `full`, element by element."""
    rows = []
    for row in full.tolist():
        local = [0.0] * part.size
        for piece in part.pieces:
            for offset in range(piece.stop - piece.start):
                local[piece.local + offset] = row[piece.start + offset]
        rows.append(local)
    return torch.tensor(rows)


@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 6), size=sizes)
def test_every_head_has_its_place(num_kv_heads: int, group: int, size: int) -> None:
    ranks = layouts(num_kv_heads * group, num_kv_heads, size)
    assert len({(len(r.kv_heads), len(r.query_heads)) for r in ranks}) == 1

    queries = [head for rank in ranks for head in rank.query_heads if head is not None]
    assert sorted(queries) == list(range(num_kv_heads * group))
    for rank in ranks:
        assert len(rank.query_heads) == len(rank.kv_heads) * rank.group
        for i, head in enumerate(rank.query_heads):
            if head is not None:
                assert rank.kv_heads[i // rank.group] == head // group

    real = [[head for head in rank.kv_heads if head is not None] for rank in ranks]
    assert all(len(heads) == len(set(heads)) for heads in real)
    copies = {sum(heads.count(head) for heads in real) for head in range(num_kv_heads)}
    assert len(copies) == 1, "every KV head is on as many ranks as any other"
    if size % num_kv_heads == 0:
        assert copies == {size // num_kv_heads}
        assert all(len(heads) == 1 for heads in real)
    elif size < 2 * num_kv_heads:
        assert copies == {1}
        assert len(ranks[0].kv_heads) == -(-num_kv_heads // size)
        assert ranks[0].group == group


@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 6))
def test_one_rank_has_all_heads_in_order(num_kv_heads: int, group: int) -> None:
    num_heads = num_kv_heads * group
    (only,) = layouts(num_heads, num_kv_heads, 1)
    assert only == HeadLayout(tuple(range(num_kv_heads)), tuple(range(num_heads)))


def test_the_demo_on_three_ranks_is_exact() -> None:
    assert layouts(9, 3, 3) == [
        HeadLayout((0,), (0, 1, 2)),
        HeadLayout((1,), (3, 4, 5)),
        HeadLayout((2,), (6, 7, 8)),
    ]


def test_the_demo_on_two_ranks_pads_to_four_kv_heads() -> None:
    assert layouts(9, 3, 2) == [
        HeadLayout((0, 1), (0, 1, 2, 3, 4, 5)),
        HeadLayout((2, None), (6, 7, 8, None, None, None)),
    ]


def test_the_demo_on_four_ranks_pads_to_four_kv_heads() -> None:
    assert layouts(9, 3, 4) == [
        HeadLayout((0,), (0, 1, 2)),
        HeadLayout((1,), (3, 4, 5)),
        HeadLayout((2,), (6, 7, 8)),
        HeadLayout((None,), (None, None, None)),
    ]


def test_the_demo_on_six_ranks_splits_its_query_groups() -> None:
    assert layouts(9, 3, 6)[:3] == [
        HeadLayout((0,), (0, 1)),
        HeadLayout((0,), (2, None)),
        HeadLayout((1,), (3, 4)),
    ]


@given(total=st.integers(1, 40), size=sizes)
def test_even_parts_joined_are_the_whole_and_zeros(total: int, size: int) -> None:
    full = torch.arange(1.0, total + 1).unsqueeze(0)
    parts = [even_part(total, fake_rank(rank, size), dim=1) for rank in range(size)]
    assert {(part.dim, part.size) for part in parts} == {(1, -(-total // size))}
    joined = torch.cat([taken(full, part) for part in parts], dim=1)
    assert torch.equal(joined[:, :total], full)
    assert not joined[:, total:].any()


@given(heads=st.lists(st.none() | st.integers(0, 5), max_size=8), head_dim=st.integers(1, 4))
def test_head_part_takes_the_named_heads(heads: list[int | None], head_dim: int) -> None:
    full = torch.arange(1.0, 6 * head_dim + 1).unsqueeze(0)
    zeros = [0.0] * head_dim
    expected = [
        value
        for head in heads
        for value in (
            zeros if head is None else full[0, head * head_dim : (head + 1) * head_dim].tolist()
        )
    ]
    part = head_part(heads, head_dim, dim=1)
    assert part.size == len(heads) * head_dim
    assert taken(full, part).tolist() == [expected]


def test_neighbouring_heads_are_one_read() -> None:
    part = head_part((1, 2, None, 3, 5), 2, dim=0)
    assert part.pieces == (Piece(2, 6, 0), Piece(6, 8, 6), Piece(10, 12, 8))


def test_one_rank_communicates_nothing() -> None:
    x = torch.randn(2, 3)
    assert TensorParallel().all_reduce(x) is x
    assert TensorParallel().all_gather(x, dim=1) is x


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_between_processes(rank_processes: RankProcesses, size: int) -> None:
    results = rank_processes.run(size, collectives, free_address())
    xs = [torch.tensor(result["operand"]) for result in results]
    assert len({str(x) for x in xs}) == size
    total = torch.zeros(2, 3)
    for x in xs:
        total = total + x
    for result in results:
        assert result["sum"] == total.tolist()
        assert result["strided sum"] == total.t().tolist()
        assert result["rows"] == torch.cat(xs).tolist()
        assert result["columns"] == torch.cat(xs, dim=1).tolist()
        assert result["strided columns"] == torch.cat([x.t() for x in xs], dim=1).tolist()
