"""The CPU kernels: right against float64 and `TorchOps`, and each row alone as in any company."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.backends.native import NativeOps, row_range
from models.kv_cache import LayerKV
from models.layers import parameter
from models.ops import Grid, TorchOps

DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIMS = (4, 16, 24, 64, 128)
PAGE_SIZES = (1, 3, 16)
KV_HEADS = 2


@pytest.fixture(scope="module")
def native() -> NativeOps:
    return NativeOps(exact=True)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`found` is the float64 result computed in float32, and then rounded to `dtype`."""
    assert found.dtype == dtype
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    noise = 1e-5 * float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=noise)


# ----------------------------------------------------------------------------------------- linear

WEIGHTS = [(33, 17), (1, 1), (7, 64), (300, 32), (576, 1536), (1536, 576)]
# Around what kernels are blocked by, and far beyond.
ROWS = [*range(1, 36), 47, 48, 49, 63, 64, 65, 95, 96, 97, 128, 129, 191, 256, 257, 300]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_loops(native: NativeOps, bias: bool, dtype: torch.dtype) -> None:
    x, weight = seeded(4, 17).to(dtype), seeded(33, 17, seed=1).to(dtype)
    shift = seeded(33, seed=2).to(dtype) if bias else None
    expected = torch.zeros(4, 33, dtype=torch.float64)
    for i in range(4):
        for j in range(33):
            products = [a * b for a, b in zip(x[i].tolist(), weight[j].tolist(), strict=True)]
            expected[i, j] = math.fsum(products) + (float(shift[j]) if shift is not None else 0)
    found = native.linear(x, native.pack(weight), shift)
    assert_rounded(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WEIGHTS)
def test_linear_equals_torch(native: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, shift = seeded(*shape, seed=1).to(dtype), seeded(shape[0], seed=2).to(dtype)
    packed = native.pack(weight)
    for rows in (1, 2, 3, 40):
        x = seeded(rows, shape[1], seed=rows).to(dtype)
        exact = x.double() @ weight.double().t()
        assert_rounded(native.linear(x, packed), exact, dtype)
        assert_rounded(native.linear(x, packed, shift), exact + shift.double(), dtype)
        found, plain = native.linear(x, packed), TorchOps().linear(x, weight)
        assert found.shape == plain.shape
        torch.testing.assert_close(found, plain, rtol=2e-2, atol=1e-2 * float(plain.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_keeps_leading_dimensions_and_reads_any_strides(
    native: NativeOps, dtype: torch.dtype
) -> None:
    weight = seeded(33, 17).to(dtype)
    packed = native.pack(weight)
    x = seeded(3, 5, 17, seed=1).to(dtype)
    found = native.linear(x, packed)
    assert found.shape == (3, 5, 33)
    assert torch.equal(found.flatten(0, 1), native.linear(x.flatten(0, 1), packed))
    strided = seeded(17, 5, seed=2).to(dtype).t()
    assert torch.equal(native.linear(strided, packed), native.linear(strided.contiguous(), packed))
    assert native.linear(x[:0], packed).shape == (0, 5, 33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WEIGHTS)
def test_a_row_of_linear_is_the_same_in_any_company(
    native: NativeOps, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = native.pack(seeded(*shape, seed=1).to(dtype))
    shift = seeded(shape[0], seed=2).to(dtype)
    x = seeded(max(ROWS), shape[1], seed=3).to(dtype)
    alone = torch.cat([native.linear(row, packed, shift) for row in x.split(1)])
    assert len(alone.unique(dim=0)) > 1
    for rows in range(1, 301) if weight_is_small(shape) else ROWS:
        some = permutation(len(x), seed=rows)[:rows]
        assert torch.equal(native.linear(x[some], packed, shift), alone[some]), rows


def weight_is_small(shape: tuple[int, int]) -> bool:
    return shape[0] * shape[1] < 10_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(1, 4), (2, 5), (3, 3)])
def test_row_counts_outside_the_bounds_are_padded_and_cut(
    native: NativeOps, bounds: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, shift = seeded(33, 17).to(dtype), seeded(33, seed=1).to(dtype)
    packed = torch.ops.dflash.pack(weight, *bounds)
    for rows in range(14):
        x = seeded(rows, 17, seed=rows).to(dtype)
        exact = x.double() @ weight.double().t() + shift.double()
        assert_rounded(native.linear(x, packed, shift), exact, dtype)


def test_without_exact_the_values_are_the_same(native: NativeOps) -> None:
    fast, weight = NativeOps(exact=False), seeded(576, 1536).bfloat16()
    x = seeded(40, 1536, seed=1).bfloat16()
    found = fast.linear(x, fast.pack(weight))
    assert_rounded(found, x.double() @ weight.double().t(), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_handle_keeps_the_packed_weight_alive(native: NativeOps, dtype: torch.dtype) -> None:
    weight, x = seeded(300, 200).to(dtype), seeded(9, 200, seed=1).to(dtype)
    expected = x.double() @ weight.double().t()
    handle = parameter(native.pack(weight))
    assert (handle.shape, handle.dtype) == (weight.shape, dtype)
    weight.fill_(float("nan"))
    del weight
    gc.collect()
    assert_rounded(native.linear(x, handle), expected, dtype)
    other = handle.detach()
    del handle
    gc.collect()
    assert_rounded(native.linear(x, other), expected, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 37])
def test_gated_mlp_equals_its_parts(
    native: NativeOps, width: int, dtype: torch.dtype, bias: bool
) -> None:
    """Its values between the matmuls are rounded once."""
    gate_up, down = seeded(2 * width, 24).to(dtype), seeded(16, width, seed=1).to(dtype)
    x = (10 * seeded(2, 3, 24, seed=2)).to(dtype)
    own = (30 * seeded(2 * width, seed=3)).to(dtype) if bias else None
    packed_gate_up, packed_down = native.pack(gate_up), native.pack(down)
    wide = native.linear(x, packed_gate_up, own).float()
    hidden = torch.nn.functional.silu(wide[..., :width]) * wide[..., width:]
    found = native.gated_mlp(x, packed_gate_up, own, packed_down)
    assert found.dtype == dtype
    expected = native.linear(hidden.to(dtype), packed_down)
    spread = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= spread * torch.finfo(dtype).eps * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_gated_mlp_is_the_same_in_any_company(
    native: NativeOps, dtype: torch.dtype
) -> None:
    gate_up, down = native.pack(seeded(2 * 96, 64).to(dtype)), native.pack(seeded(48, 96).to(dtype))
    x = seeded(300, 64, seed=1).to(dtype)
    alone = torch.cat([native.gated_mlp(row, gate_up, None, down) for row in x.split(1)])
    for rows in (2, 7, 32, 33, 300):
        assert torch.equal(native.gated_mlp(x[:rows], gate_up, None, down), alone[:rows])


def test_a_handle_frees_the_packed_weight(native: NativeOps) -> None:
    fast, process = NativeOps(exact=False), psutil.Process()
    # Over 32 MiB malloc always maps and unmaps: what is held shows at once, whatever ran before.
    weight = seeded(4096, 3072)
    size = weight.numel() * weight.element_size()
    kept = [fast.pack(weight)]
    before = process.memory_info().rss
    kept += [fast.pack(weight) for _ in range(3)]
    held = process.memory_info().rss - before
    assert held > 2 * size, "the measure sees no packed weights"
    kept.clear()
    for _ in range(3):
        fast.pack(weight)
    assert process.memory_info().rss - before < size


def library(agrees_at: Callable[[int], bool]) -> Callable[..., Tensor]:
    """A `linear` whose result depends on the row count where `agrees_at` says no."""

    def linear(x: Tensor, handle: Tensor, bias: Tensor | None) -> Tensor:
        return x[:, :1] if agrees_at(len(x)) else x[:, :1] + 1

    return linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WEIGHTS)
def test_the_row_range_is_sane_and_holds(
    native: NativeOps, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = seeded(*shape, seed=1).to(dtype)
    least, most = row_range(weight)
    assert least in (1, 2)
    assert most >= 3
    plain = torch.ops.dflash.pack(weight, 1, 1 << 40)
    x = seeded(64, shape[1], seed=2).to(dtype)
    pairs = torch.cat([torch.ops.dflash.linear(pair, plain, None) for pair in x.split(2)])
    for rows in range(least, min(most, 64) + 1):
        assert torch.equal(torch.ops.dflash.linear(x[:rows], plain, None), pairs[:rows]), rows


@pytest.mark.parametrize(
    ("agrees_at", "expected"),
    [
        (lambda rows: True, (1, 1 << 40)),
        (lambda rows: rows > 1, (2, 1 << 40)),
        (lambda rows: 1 < rows < 16, (2, 15)),
        (lambda rows: rows < 8, (1, 7)),
        (lambda rows: rows != 3 and rows < 100, None),
    ],
    ids=["any", "not-one", "to-15", "to-7", "not-three"],
)
def test_the_row_range_is_what_the_library_keeps_to(
    native: NativeOps,
    monkeypatch: pytest.MonkeyPatch,
    agrees_at: Callable[[int], bool],
    expected: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(torch.ops.dflash, "linear", library(agrees_at))
    if expected is not None:
        assert row_range(seeded(5, 6)) == expected
        return
    with pytest.raises(RuntimeError, match=r"exact: .*\[5, 6\] torch.float32 .*exact: false"):
        row_range(seeded(5, 6))


# -------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Paged:
    """A random pool, a block table and query heads."""

    page_size: int
    group: int
    head_dim: int
    dtype: torch.dtype
    num_slots: int = 4
    num_pages: int = 6  # of a slot

    @property
    def kv(self) -> LayerKV:
        shape = (1 + self.num_slots * self.num_pages, self.page_size, KV_HEADS, self.head_dim)
        return LayerKV(seeded(*shape, seed=1).to(self.dtype), seeded(*shape, seed=2).to(self.dtype))

    @property
    def table(self) -> Tensor:
        pages = 1 + permutation(self.num_slots * self.num_pages, seed=3)
        return pages.view(self.num_slots, self.num_pages).to(torch.int32)

    @property
    def max_len(self) -> int:
        return self.page_size * self.num_pages

    def q(self, tokens: int, scale: float = 1.0) -> Tensor:
        q = scale * seeded(tokens, KV_HEADS, self.group, self.head_dim, seed=4)
        return q.to(self.dtype)


def attend_slowly(
    q: Tensor, kv: LayerKV, pages: list[int], length: int, own: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """One token `[kv_heads, group, head_dim]` over `length` keys in `pages`, then over its own
    block's `[block, kv_heads, head_dim]`: float64, flat."""
    size = kv.page_size
    places = [(pages[i // size], i % size) for i in range(length)]
    keys = [kv.k[page, offset] for page, offset in places] + ([*own[0]] if own else [])
    values = [kv.v[page, offset] for page, offset in places] + ([*own[1]] if own else [])
    if not keys:
        return torch.zeros(q.numel(), dtype=torch.float64)
    k, v = torch.stack(keys).double(), torch.stack(values).double()
    out = []
    for head in range(q.shape[0]):
        for query in q[head].double():
            scores = (k[:, head] * query).sum(1) / math.sqrt(q.shape[-1])
            weights = (scores - scores.max()).exp()
            out.append((weights.unsqueeze(1) * v[:, head]).sum(0) / weights.sum())
    return torch.cat(out)


def as_float(kv: LayerKV) -> LayerKV:
    return LayerKV(kv.k.float(), kv.v.float())


CASES = [
    pytest.param(page, group, dim, dtype, id=f"page{page}-group{group}-dim{dim}-{str(dtype)[6:]}")
    for page in PAGE_SIZES
    for group in (1, 2, 3, 4)
    for dim in HEAD_DIMS
    for dtype in DTYPES
]


@pytest.mark.parametrize(("page_size", "group", "head_dim", "dtype"), CASES)
def test_paged_attention_equals_loops_and_torch(
    native: NativeOps, page_size: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Two grids whose rows begin anywhere, one longer than a task, with invalid tokens within and
    padding behind."""
    case = Paged(page_size, group, head_dim, dtype, num_pages=60 // page_size + 1)
    kv, table = case.kv, case.table
    starts = [[0, page_size - 1, 33], [0, 14]]
    grids = []
    for first, width in zip(starts, (5, 19), strict=True):
        positions = ints(first).unsqueeze(1) + torch.arange(width, dtype=torch.int32)
        valid = torch.arange(width) < ints([width, width - 2, width - 1][: len(first)])[:, None]
        grids.append(Grid(ints([2, 0, 3][: len(first)]), positions, valid))
    num_tokens = 3 * 5 + 2 * 19 + 4
    q = case.q(num_tokens)
    context = native.causal_context(table, grids, page_size, case.num_pages, num_tokens)
    found = native.paged_attention(q, kv, context)
    torch_ops = TorchOps()
    plain = torch_ops.paged_attention(
        q.float(),
        as_float(kv),
        torch_ops.causal_context(table, grids, page_size, case.num_pages, num_tokens),
    )
    assert found.shape == plain.shape
    expected, valid_tokens = torch.zeros(found.shape, dtype=torch.float64), []
    token = 0
    for grid in grids:
        for slot, row, mask in zip(*(part.tolist() for part in grid), strict=True):
            for position, is_valid in zip(row, mask, strict=True):
                if is_valid:
                    expected[token] = attend_slowly(
                        q[token], kv, table[slot].tolist(), position + 1
                    )
                    valid_tokens.append(token)
                token += 1
    assert_rounded(found, expected, dtype)
    assert not found[num_tokens - 4 :].any()
    assert_rounded(plain[valid_tokens], expected[valid_tokens], torch.float32)


@pytest.mark.parametrize("block", [1, 3, 10, 17, 33])
@pytest.mark.parametrize(("page_size", "group", "head_dim", "dtype"), CASES[::3])
def test_block_attention_equals_loops_and_torch(
    native: NativeOps, page_size: int, group: int, head_dim: int, dtype: torch.dtype, block: int
) -> None:
    case = Paged(page_size, group, head_dim, dtype)
    kv, table = case.kv, case.table
    before = kv.k.clone(), kv.v.clone()
    slots, lens = ints([1, 3, 0, 3]), ints([0, page_size, case.max_len, 5 * page_size - 1])
    rows = len(slots)
    q = case.q(rows * block).unflatten(0, (rows, block))
    k, v = seeded(2, rows, block, KV_HEADS, head_dim, seed=5).to(dtype)

    def run(ops: NativeOps | TorchOps, *values: Tensor, kv: LayerKV) -> Tensor:
        context = ops.block_context(table, slots, lens, block, page_size, case.num_pages)
        return ops.block_attention(*values, kv, context)

    found = run(native, q, k, v, kv=kv)
    plain = run(TorchOps(), q.float(), k.float(), v.float(), kv=as_float(kv))
    assert found.shape == plain.shape
    expected = torch.stack(
        [
            attend_slowly(q[r, b], kv, table[slot].tolist(), length, (k[r], v[r]))
            for r, (slot, length) in enumerate(zip(slots.tolist(), lens.tolist(), strict=True))
            for b in range(block)
        ]
    ).view(found.shape)
    assert_rounded(found, expected, dtype)
    assert_rounded(plain, expected, torch.float32)
    assert torch.equal(kv.k, before[0])
    assert torch.equal(kv.v, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_extreme_scores_do_no_harm(native: NativeOps, dtype: torch.dtype, scale: float) -> None:
    """Ever larger ones, ever smaller ones: weights far below what float32 holds are zeros."""
    case = Paged(16, 2, 64, dtype)
    for rising in (False, True):
        kv, table = case.kv, case.table
        order = torch.linspace(-1, 1, case.max_len) * (1 if rising else -1)
        for i, level in enumerate(order.tolist()):
            kv.k[table[1, i // 16].item(), i % 16] = level
        q = case.q(1, scale)
        grid = Grid(ints([1]), ints([case.max_len - 1]).unsqueeze(1), torch.ones(1, 1).bool())
        context = native.causal_context(table, [grid], 16, case.num_pages, 1)
        found = native.paged_attention(q, kv, context)
        expected = attend_slowly(q[0], kv, table[1].tolist(), case.max_len).unsqueeze(0)
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=1e-3)


def single(case: Paged, slots: Tensor, lens: Tensor) -> list[Grid]:
    """Each token a row of its own."""
    return [Grid(slots, lens.unsqueeze(1) - 1, torch.ones(len(slots), 1).bool())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "page_size"), [(64, 3, 16), (24, 1, 3), (128, 4, 1)])
def test_a_token_of_attention_is_the_same_in_any_company(
    native: NativeOps, head_dim: int, group: int, page_size: int, dtype: torch.dtype
) -> None:
    """Whatever stands beside it, in whatever order, with whatever threads and table."""
    case = Paged(page_size, group, head_dim, dtype, num_pages=48 // page_size)
    kv, table, count = case.kv, case.table, 70
    generator = torch.Generator().manual_seed(5)
    lens = torch.randint(1, case.max_len + 1, (count,), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, 4, (count,), generator=generator, dtype=torch.int32)
    q = case.q(count)

    def run(tokens: Tensor, padding: int = 0, table: Tensor = table) -> Tensor:
        size = len(tokens) + padding
        context = native.causal_context(
            table, single(case, slots[tokens], lens[tokens]), page_size, table.shape[1], size
        )
        padded = torch.cat([q[tokens], case.q(padding)])
        return native.paged_attention(padded, kv, context)[: len(tokens)]

    everyone = torch.arange(count)
    alone = torch.cat([run(token) for token in everyone.split(1)])
    assert torch.equal(run(everyone), alone)
    by_slot = slots.argsort(stable=True)
    assert torch.equal(run(by_slot), alone[by_slot]), "tokens that share their keys"
    wider = torch.cat([table, torch.full_like(table, 10**6)], dim=1)
    for seed in range(12):
        some = permutation(count, seed)[: 1 + 6 * seed]
        assert torch.equal(run(some, padding=seed % 4), alone[some])
        assert torch.equal(run(some.sort().values, table=wider), alone[some.sort().values])
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(everyone), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_in_any_chunk(native: NativeOps, dtype: torch.dtype) -> None:
    """Of its own sequence: tokens of one row share their keys, and long rows are cut."""
    case = Paged(16, 3, 64, dtype)
    length = case.max_len
    q, kv, table = case.q(length), case.kv, case.table

    def run(start: int, stop: int, widths: int) -> Tensor:
        """The tokens in rows of so many."""
        out = []
        for first in range(start, stop, widths):
            positions = torch.arange(first, min(first + widths, stop), dtype=torch.int32)
            grid = Grid(ints([2]), positions[None], torch.ones(1, len(positions)).bool())
            context = native.causal_context(table, [grid], 16, 6, len(positions))
            out.append(native.paged_attention(q[positions.long()], kv, context))
        return torch.cat(out)

    alone = run(0, length, 1)
    for width in (2, 3, 7, 8, 9, 16, 17, 40, length):
        assert torch.equal(run(0, length, width), alone)
        assert torch.equal(run(13, 71, width), alone[13:71])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [5, 10, 17])
def test_a_block_is_the_same_in_any_company(
    native: NativeOps, block: int, dtype: torch.dtype
) -> None:
    case = Paged(3, 2, 64, dtype, num_pages=20)
    kv, table, rows = case.kv, case.table, 9
    slots, lens = ints([0, 1, 1, 1, 2, 3, 3, 0, 2]), ints([0, 60, 59, 7, 31, 16, 15, 60, 0])
    q = case.q(rows * block).unflatten(0, (rows, block))
    k, v = seeded(2, rows, block, KV_HEADS, 64, seed=6).to(dtype)

    def run(some: Tensor) -> Tensor:
        context = native.block_context(table, slots[some], lens[some], block, 3, 20)
        return native.block_attention(q[some], k[some], v[some], kv, context)

    everyone = torch.arange(rows)
    alone = torch.cat([run(row) for row in everyone.split(1)])
    assert torch.equal(run(everyone), alone)
    for seed in range(8):
        some = permutation(rows, seed)[: 1 + seed]
        assert torch.equal(run(some), alone[some])


def test_strided_queries_are_read_as_they_are(native: NativeOps) -> None:
    """A layer's q, k and v are views of one matrix."""
    case = Paged(3, 2, 16, torch.float32)
    lens, slots = ints([5, 9, 1]), ints([0, 1, 2])
    context = native.causal_context(case.table, single(case, slots, lens), 3, 6, 3)
    wide = torch.cat([case.q(3), case.q(3)], dim=-1)
    expected = native.paged_attention(case.q(3), case.kv, context)
    assert torch.equal(native.paged_attention(wide[..., :16], case.kv, context), expected)

    own = seeded(2, 3, 2, KV_HEADS, 32, seed=5)
    context = native.block_context(case.table, slots, lens, 2, 3, 6)
    q = case.q(6).unflatten(0, (3, 2))
    k, v = own[..., :16]
    expected = native.block_attention(q, k.contiguous(), v.contiguous(), case.kv, context)
    assert torch.equal(native.block_attention(q, k, v, case.kv, context), expected)


# ----------------------------------------------------------------------------------------- argmax


def first_maximum(row: list[float]) -> int:
    best = 0
    for index, value in enumerate(row):
        if value > row[best]:
            best = index
    return best


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), width=st.integers(1, 40), rows=st.integers(0, 4))
def test_argmax_is_the_first_maximum(
    native: NativeOps, dtype: torch.dtype, data: st.DataObject, width: int, rows: int
) -> None:
    value = st.sampled_from([-math.inf, -3.0, 0.0, -0.0, 1.5, 2.0])
    row = st.lists(value, min_size=width, max_size=width)
    lists = data.draw(st.lists(row, min_size=rows, max_size=rows))
    values = torch.tensor(lists).reshape(rows, width).to(dtype)
    found = native.argmax(values)
    assert found.dtype == torch.int32
    assert found.tolist() == [first_maximum(row) for row in lists]
    assert found.tolist() == TorchOps().argmax(values).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [15, 16, 17, 511, 512, 513, 1024, 1025, 1500])
def test_argmax_finds_a_maximum_anywhere(native: NativeOps, width: int, dtype: torch.dtype) -> None:
    """One, and one that comes again behind it; among smaller values and among -inf."""
    for low in (0.0, -math.inf):
        values = torch.full((width, width), low)
        values.fill_diagonal_(1.0)
        assert native.argmax(values.to(dtype)).tolist() == list(range(width))
        twice = values + values.roll(1, 0)
        twice[twice == -math.inf] = low
        twice = torch.where(twice.isfinite(), twice, low)
        expected = [first_maximum(row) for row in twice.tolist()]
        assert native.argmax(twice.to(dtype)).tolist() == expected
    for level in (-math.inf, -2.0, 0.0, 5.0):
        assert native.argmax(torch.full((2, width), level).to(dtype)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_a_row_is_the_same_in_any_company(native: NativeOps, dtype: torch.dtype) -> None:
    values = seeded(40, 777).to(dtype)
    alone = torch.cat([native.argmax(row) for row in values.split(1)])
    assert alone.tolist() == [first_maximum(row) for row in values.tolist()]
    for seed in range(10):
        some = permutation(40, seed)[: 1 + 4 * seed]
        assert torch.equal(native.argmax(values[some]), alone[some])
    strided = values.t().contiguous().t()
    assert torch.equal(native.argmax(strided), alone)


# ----------------------------------------------------------------------------- what is refused


def test_linear_refuses_what_does_not_fit(native: NativeOps) -> None:
    weight = seeded(33, 17)
    packed = native.pack(weight)
    with pytest.raises(RuntimeError, match="not the handle of a packed weight"):
        native.linear(seeded(2, 17), weight)
    with pytest.raises(RuntimeError, match=r"x is \[2, 16\], weight \[33, 17\]"):
        native.linear(seeded(2, 16), packed)
    with pytest.raises(RuntimeError):
        native.linear(seeded(2, 17).bfloat16(), packed)
    with pytest.raises(RuntimeError, match="3 dimensions, not 2"):
        NativeOps(exact=False).pack(seeded(2, 3, 4))


def test_argmax_refuses_what_has_no_maximum(native: NativeOps) -> None:
    with pytest.raises(RuntimeError, match=r"values are \[2, 0\]"):
        native.argmax(torch.zeros(2, 0))
    with pytest.raises(RuntimeError, match=r"values are \[2\]"):
        native.argmax(torch.zeros(2))
    with pytest.raises(RuntimeError):
        native.argmax(torch.zeros(2, 3, dtype=torch.float64))


Arguments = dict[str, Tensor | None]


def arguments() -> Arguments:
    """Of a call in order: three blocks of two tokens."""
    case = Paged(3, 2, 16, torch.float32)
    return {
        "q": case.q(6),
        "k_pool": case.kv.k,
        "v_pool": case.kv.v,
        "block_table": case.table,
        "slots": ints([0, 0, 1, 1, 2, 2]),
        "lens": ints([3, 3, 0, 0, 18, 18]),
        "own_k": seeded(3, 2, KV_HEADS, 16),
        "own_v": seeded(3, 2, KV_HEADS, 16, seed=1),
    }


@pytest.mark.parametrize("name", arguments())
def test_attention_refuses_another_type(native: NativeOps, name: str) -> None:
    torch.ops.dflash.paged_attention(*arguments().values())
    wrong = arguments()
    for dtype in (torch.float64, torch.int64):
        argument = arguments()[name]
        assert argument is not None
        wrong[name] = argument.to(dtype)
        with pytest.raises(RuntimeError, match=" is "):
            torch.ops.dflash.paged_attention(*wrong.values())


@pytest.mark.parametrize("name", arguments())
def test_attention_refuses_another_number_of_dimensions(native: NativeOps, name: str) -> None:
    wrong = arguments()
    argument = wrong[name]
    assert argument is not None
    wrong[name] = argument.unsqueeze(0)
    with pytest.raises(RuntimeError, match="dimensions, not"):
        torch.ops.dflash.paged_attention(*wrong.values())


def test_attention_refuses_pools_that_are_not_contiguous(native: NativeOps) -> None:
    """They are never copied: that would cost a step the whole pool."""
    for name in ("k_pool", "v_pool"):
        wrong = arguments()
        argument = wrong[name]
        assert argument is not None
        wrong[name] = argument.transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(RuntimeError, match=f"{name} is not contiguous"):
            torch.ops.dflash.paged_attention(*wrong.values())


def test_half_precision_of_another_kind_is_refused(native: NativeOps) -> None:
    wrong = {
        name: argument.half() if argument is not None and argument.is_floating_point() else argument
        for name, argument in arguments().items()
    }
    with pytest.raises(RuntimeError, match="not float32 or bfloat16"):
        torch.ops.dflash.paged_attention(*wrong.values())
