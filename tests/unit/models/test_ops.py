"""`TorchOps` against loops, from grids and slots as a step has them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.kv_cache import LayerKV
from models.ops import Grid, TorchOps

OPS = TorchOps()
KV_HEADS, GROUP, HEAD_DIM, PAGE = 2, 2, 4, 3
TABLE = torch.tensor([[4, 1, 7, 99], [2, 5, 0, 99], [3, 6, 8, 99]], dtype=torch.int32)
CONTEXT_PAGES = 3


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def kv() -> LayerKV:
    return LayerKV(*seeded(2, 9, PAGE, KV_HEADS, HEAD_DIM, seed=1))


def attend_slowly(q: Tensor, seen: list[tuple[Tensor, Tensor]]) -> list[float]:
    """One token `[kv_heads, group, head_dim]` over keys and values `[kv_heads, head_dim]`."""
    out: list[float] = []
    for head in range(KV_HEADS):
        for query in q[head].tolist():
            scores = [
                math.fsum(a * b for a, b in zip(query, k[head].tolist(), strict=True))
                / math.sqrt(HEAD_DIM)
                for k, _ in seen
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            out += [
                math.fsum(w * float(v[head, i]) for w, (_, v) in zip(weights, seen, strict=True))
                / math.fsum(weights)
                for i in range(HEAD_DIM)
            ]
    return out


def context_of(kv: LayerKV, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
    places = [(int(TABLE[slot, i // PAGE]), i % PAGE) for i in range(length)]
    return [(kv.k[page, offset], kv.v[page, offset]) for page, offset in places]


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_tokens_see_their_slots_pages_and_padding_gives_zeros(kv: LayerKV, padding: int) -> None:
    """Slots in any order and twice; pages beyond the context are never looked at."""
    grids = [
        Grid(ints(2, 0), torch.tensor([[7, 8], [3, 3]], dtype=torch.int32), torch.ones(2, 2) > 0),
        Grid(ints(2), torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.ones(1, 3) > 0),
    ]
    q = seeded(7 + padding, KV_HEADS, GROUP, HEAD_DIM, seed=2)
    context = OPS.causal_context(TABLE, grids, PAGE, CONTEXT_PAGES, 7 + padding)
    found = OPS.paged_attention(q, kv, context)
    assert found.shape == (7 + padding, KV_HEADS * GROUP * HEAD_DIM)
    tokens = [(2, 7), (2, 8), (0, 3), (0, 3), (2, 0), (2, 1), (2, 2)]
    for token, (slot, position) in enumerate(tokens):
        expected = attend_slowly(q[token], context_of(kv, slot, position + 1))
        assert found[token].tolist() == pytest.approx(expected, abs=1e-5)
    assert not found[7:].any()


def test_without_grids_all_is_padding(kv: LayerKV) -> None:
    q = seeded(2, KV_HEADS, GROUP, HEAD_DIM)
    context = OPS.causal_context(TABLE, [], PAGE, CONTEXT_PAGES, 2)
    assert not OPS.paged_attention(q, kv, context).any()


@pytest.mark.parametrize("block", [1, 4])
def test_blocks_see_their_slots_context_and_themselves(kv: LayerKV, block: int) -> None:
    slots, lens = [2, 0, 2, 1], [9, 0, 4, 3]
    q = seeded(4, block, KV_HEADS, GROUP, HEAD_DIM, seed=2)
    k, v = seeded(2, 4, block, KV_HEADS, HEAD_DIM, seed=3)
    context = OPS.block_context(TABLE, ints(*slots), ints(*lens), block, PAGE, CONTEXT_PAGES)
    found = OPS.block_attention(q, k, v, kv, context)
    assert found.shape == (4, block, KV_HEADS * GROUP * HEAD_DIM)
    for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
        seen = [*context_of(kv, slot, length), *zip(k[row], v[row], strict=True)]
        for place in range(block):
            expected = attend_slowly(q[row, place], seen)
            assert found[row, place].tolist() == pytest.approx(expected, abs=1e-5)


@given(
    st.integers(1, 20).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    )
)
def test_argmax_is_the_first_of_the_largest(rows: list[list[float]]) -> None:
    found = OPS.argmax(torch.tensor(rows))
    assert found.dtype == torch.int32
    assert found.tolist() == [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_loops(bias: bool) -> None:
    x, weight, shift = seeded(2, 3, 5), seeded(4, 5, seed=1), seeded(4, seed=2)
    found = OPS.linear(x, OPS.pack(weight), shift if bias else None)
    assert found.shape == (2, 3, 4)
    for i in range(2):
        for j in range(3):
            for k in range(4):
                products = zip(x[i, j].tolist(), weight[k].tolist(), strict=True)
                expected = math.fsum(a * b for a, b in products) + bias * float(shift[k])
                assert float(found[i, j, k]) == pytest.approx(expected, abs=1e-5)
