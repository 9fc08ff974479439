"""Attention over pages against loops over queries, heads and keys."""

import math

import pytest
import torch
from torch import Tensor

from models.attention import attend, block_attention, causal_grid, paged_attention
from models.kv_cache import KVSpec, LayerKV, allocate

KV_HEADS, GROUP, HEAD_DIM, PAGE = 2, 3, 4, 3


def attend_slowly(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> list[float]:
    """One query head `[head_dim]` over the keys it may see."""
    scores = [
        sum(a * b for a, b in zip(q.tolist(), key.tolist(), strict=True)) / math.sqrt(len(q))
        for key in keys
    ]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [
        sum(w * float(value[i]) for w, value in zip(weights, values, strict=True)) / sum(weights)
        for i in range(len(q))
    ]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_pool(num_pages: int) -> LayerKV:
    (pool,) = allocate([KVSpec(KV_HEADS, HEAD_DIM, torch.float32)], num_pages, PAGE)
    pool.k.copy_(seeded(*pool.k.shape, seed=1))
    pool.v.copy_(seeded(*pool.v.shape, seed=2))
    return pool


def at(pool: Tensor, pages: list[int], position: int) -> Tensor:
    return pool[pages[position // PAGE], position % PAGE]


def test_causal_grid_sees_up_to_its_own_position() -> None:
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    positions = torch.tensor([[0, 2, 3], [5, 1, 1]], dtype=torch.int32)
    grid = causal_grid(table, positions, PAGE)
    assert grid.num_tokens == 6
    for row in range(2):
        for column in range(3):
            for key in range(2 * PAGE):
                assert bool(grid.mask[row, column, key]) == (key <= int(positions[row, column]))


@pytest.mark.parametrize("width", [1, 4])
def test_attend_equals_loops(width: int) -> None:
    rows, length = 2, 5
    q = seeded(rows, width, KV_HEADS, GROUP, HEAD_DIM)
    k, v = seeded(2, rows, length, KV_HEADS, HEAD_DIM, seed=3)
    mask = torch.rand(rows, width, length, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[..., 0] = True
    found = attend(q, k, v, mask)
    assert found.shape == q.shape
    for r in range(rows):
        for w in range(width):
            seen = mask[r, w].nonzero().flatten().tolist()
            for h in range(KV_HEADS):
                for g in range(GROUP):
                    expected = attend_slowly(
                        q[r, w, h, g], [k[r, i, h] for i in seen], [v[r, i, h] for i in seen]
                    )
                    assert found[r, w, h, g].tolist() == pytest.approx(expected, abs=1e-5)


def test_paged_attention_equals_loops_over_two_grids() -> None:
    pool = filled_pool(8)
    cases = [
        ([[5, 2, 7], [1, 4, 0]], [[6, 7], [3, 3]]),  # at a page's edge; a padded table
        ([[3, 6]], [[0, 1, 2, 3, 4]]),
    ]
    grids = [
        causal_grid(
            torch.tensor(table, dtype=torch.int32), torch.tensor(where, dtype=torch.int32), PAGE
        )
        for table, where in cases
    ]
    q = seeded(9, KV_HEADS, GROUP, HEAD_DIM)
    found = paged_attention(q, pool, grids)
    assert found.shape == (9, KV_HEADS * GROUP * HEAD_DIM)
    places = [
        (pages, position)
        for table, where in cases
        for pages, row in zip(table, where, strict=True)
        for position in row
    ]
    for token, (pages, position) in enumerate(places):
        expected: list[float] = []
        for h in range(KV_HEADS):
            keys = [at(pool.k, pages, i)[h] for i in range(position + 1)]
            values = [at(pool.v, pages, i)[h] for i in range(position + 1)]
            for g in range(GROUP):
                expected += attend_slowly(q[token, h, g], keys, values)
        assert found[token].tolist() == pytest.approx(expected, abs=1e-5)


def test_block_attention_equals_loops() -> None:
    pool = filled_pool(8)
    before = pool.k.clone(), pool.v.clone()
    tables, context_lens, block = [[5, 2], [1, 4], [3, 0]], [4, 6, 0], 3
    q = seeded(3, block, KV_HEADS, GROUP, HEAD_DIM)
    k, v = seeded(2, 3, block, KV_HEADS, HEAD_DIM, seed=5)
    context_mask = torch.arange(2 * PAGE) < torch.tensor(context_lens).unsqueeze(1)
    found = block_attention(q, k, v, pool, torch.tensor(tables, dtype=torch.int32), context_mask)
    assert found.shape == (3, block, KV_HEADS * GROUP * HEAD_DIM)
    for r, (pages, length) in enumerate(zip(tables, context_lens, strict=True)):
        for b in range(block):
            expected: list[float] = []
            for h in range(KV_HEADS):
                keys = [at(pool.k, pages, i)[h] for i in range(length)] + [*k[r, :, h]]
                values = [at(pool.v, pages, i)[h] for i in range(length)] + [*v[r, :, h]]
                for g in range(GROUP):
                    expected += attend_slowly(q[r, b, h, g], keys, values)
            assert found[r, b].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(pool.k, before[0])
    assert torch.equal(pool.v, before[1])
