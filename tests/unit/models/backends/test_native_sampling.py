"""The CPU's draws: those of plain torch, from the exact distribution, each row as if alone."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.backends.native import NativeOps
from models.layers import LMHead
from models.ops import TorchOps
from models.parallel import TensorParallel
from models.sampling import SamplingRows, sample
from models.scores import choice_scores
from tests.unit.models.draws import chi_square, distribution, random_seeds, sampling_rows

DTYPES = (torch.float32, torch.bfloat16)
DRAWS = 100_000
LEAST_P = 0.01 / 20


@pytest.fixture(scope="module")
def native() -> NativeOps:
    return NativeOps(exact=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_rows(count: int, seed: int) -> SamplingRows:
    rng = random.Random(seed)

    def floats(*values: float) -> Tensor:
        return torch.tensor(rng.choices(values, k=count))

    return SamplingRows(
        temperature=floats(0.0, 1e-6, 0.1, 0.7, 1.0, 2.0, 50.0),
        top_p=floats(1.0, 1.0, 0.999999, 0.95, 0.5, 1e-3, 0.0),
        min_p=floats(0.0, 0.0, 0.05, 0.6, 1.0),
        top_k=torch.tensor(rng.choices([0, 0, 1, 2, 5, 40, 10_000], k=count), dtype=torch.int32),
        seeds=random_seeds(count, seed),
        positions=torch.tensor([rng.randrange(100_000) for _ in range(count)], dtype=torch.int32),
    )


def assert_draws_of_torch(native: NativeOps, logits: Tensor, rows: SamplingRows) -> None:
    """But for rows in which the last bit of a logarithm or of an exponential decides."""
    found, expected = native.sample(logits, rows), TorchOps().sample(logits, rows)
    assert (found.dtype, found.shape) == (torch.int32, expected.shape)
    scores = choice_scores(logits, rows, 0, TensorParallel())
    behind = scores.amax(1) - scores.gather(1, found.long().unsqueeze(1)).squeeze(1)
    differs = found != expected
    for step in (1 - 1e-6, 1 + 1e-6):
        other = rows._replace(top_p=rows.top_p * step, min_p=rows.min_p * step)
        differs &= found != TorchOps().sample(logits, other)
    assert not (differs & ~(behind < 1e-5)).any()
    assert (found != expected).sum() <= 1 + len(found) // 500


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 20.0])
def test_draws_are_those_of_torch(native: NativeOps, scale: float, dtype: torch.dtype) -> None:
    for seed, vocab_size in enumerate((2, 50, 1000, 5003)):
        logits = (scale * normal(500, vocab_size, seed=seed)).to(dtype)
        assert_draws_of_torch(native, logits, random_rows(500, seed))


@pytest.mark.parametrize("width", [*range(1, 18), 31, 32, 33, 511, 512, 513])
def test_every_width_is_read_to_its_end(native: NativeOps, width: int) -> None:
    for dtype in DTYPES:
        assert_draws_of_torch(native, torch.zeros(200, width, dtype=dtype), random_rows(200, width))
        assert_draws_of_torch(native, normal(200, width).to(dtype), random_rows(200, width + 1))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=st.integers(1, 40))
def test_extremes_are_those_of_torch(native: NativeOps, seed: int, vocab_size: int) -> None:
    """Few different values, so that many tie, and such as overflow when divided."""
    rng = random.Random(seed)
    values = [-math.inf, -math.inf, -1e38, -100.0, -17.4, -3.0, -0.0, 0.0, 1e-40, 2.0]
    logits = torch.tensor(rng.choices(values, k=8 * vocab_size)).view(8, vocab_size)
    assert_draws_of_torch(native, logits, random_rows(8, seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_drawn_alike_in_any_company(native: NativeOps, dtype: torch.dtype) -> None:
    logits, rows = (3 * normal(300, 777)).to(dtype), random_rows(300, 0)
    together = native.sample(logits, rows)
    for row in range(300):
        one = torch.tensor([row])
        assert native.sample(logits[one], SamplingRows(*(f[one] for f in rows))) == together[row]
    for seed in range(10):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))[: 1 + 30 * seed]
        found = native.sample(logits[order], SamplingRows(*(field[order] for field in rows)))
        assert torch.equal(found, together[order])
    num_threads = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(native.sample(logits, rows), together)
    finally:
        torch.set_num_threads(num_threads)


def test_strided_arguments_are_read_as_they_are(native: NativeOps) -> None:
    logits, rows = normal(20, 30), random_rows(20, 5)
    strided = SamplingRows(*(torch.stack([field, field], -1)[..., 0] for field in rows))
    found = native.sample(torch.cat([logits, logits], dim=1)[:, :30], strided)
    assert torch.equal(found, native.sample(logits, rows))


def test_equal_shares_are_cut_as_torch_cuts_them(native: NativeOps) -> None:
    logits = torch.tensor([[0.0, -1e-9, -2e-9, -3e-9]]).expand(2000, 4)
    rows = sampling_rows(2000)._replace(seeds=random_seeds(2000))
    for top_p, expected in ((0.0, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.750001, 4)):
        found = native.sample(logits, rows._replace(top_p=torch.full((2000,), top_p)))
        assert found.unique().tolist() == list(range(expected))


def test_one_rank_draws_with_the_kernel(native: NativeOps) -> None:
    logits, rows = normal(20, 30), random_rows(20, 6)
    head = LMHead(torch.zeros(30, 1), 30, TensorParallel(), native)
    assert torch.equal(sample(logits, rows, head), native.sample(logits, rows))


# ----------------------------------------------------------------------------------- distribution

THREE, FIFTY = torch.tensor([1.0, 0.0, 0.3]), 2 * normal(50, seed=3)
HOW: list[dict[str, float]] = [
    {},
    {"temperature": 0.1},
    {"temperature": 3.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def drawn(native: NativeOps, logits: Tensor, rows: SamplingRows) -> Tensor:
    ids = native.sample(logits.expand(len(rows.positions), -1), rows)
    return ids.bincount(minlength=len(logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW, ids=repr)
@pytest.mark.parametrize("logits", [THREE, FIFTY], ids=len)
def test_draws_have_the_distribution(
    native: NativeOps, logits: Tensor, how: dict[str, float], dtype: torch.dtype
) -> None:
    rows = sampling_rows(DRAWS, **how)  # type: ignore[arg-type]
    rows.seeds[:, 0] = torch.arange(DRAWS)
    counts = drawn(native, logits.to(dtype), rows)
    assert chi_square(counts, distribution(logits.to(dtype), rows)) > LEAST_P


@pytest.mark.parametrize("logits", [THREE, FIFTY], ids=len)
def test_the_test_sees_a_fiftieth_of_the_probability_moved(
    native: NativeOps, logits: Tensor
) -> None:
    rows = sampling_rows(DRAWS)
    rows.seeds[:, 0] = torch.arange(DRAWS)
    wrong = distribution(logits, rows)
    best, second = wrong.argsort(descending=True)[:2]
    wrong[best] -= 0.02
    wrong[second] += 0.02
    assert chi_square(drawn(native, logits, rows), wrong) < 1e-9


def test_a_token_far_behind_the_best_is_drawn_as_often_as_it_should(native: NativeOps) -> None:
    draws = 2_000_000
    rows = sampling_rows(draws)
    rows.seeds[:, 0] = torch.arange(draws)
    logits = torch.full((40,), -12.0)
    logits[3] = 0.0
    expected = draws * 39 * math.exp(-12)
    found = draws - int(drawn(native, logits, rows)[3])
    assert abs(found - expected) < 4 * math.sqrt(expected)


# ----------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 97])
def test_masks_are_those_of_torch(native: NativeOps, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = normal(6, size).to(dtype)
    words = torch.randint(-(2**31), 2**31, (6, -(-size // 32)), generator=generator).int()
    words[4], words[5] = -1, 0
    masked = torch.tensor([True, True, False, True, True, True])
    before = logits.clone()
    found = native.constrain(logits, words, masked)
    assert found.dtype == dtype
    assert torch.equal(found, TorchOps().constrain(logits, words, masked))
    assert torch.equal(logits, before)
    strided = normal(size, 6).to(dtype).T
    expected = TorchOps().constrain(strided, words, masked)
    assert torch.equal(native.constrain(strided, words, masked), expected)


# --------------------------------------------------------------------------------------- refusals


def test_masks_that_do_not_fit_are_refused(native: NativeOps) -> None:
    logits, words, masked = torch.zeros(2, 40), torch.zeros(2, 2).int(), torch.ones(2).bool()
    native.constrain(logits, words, masked)
    for wrong in (words[:1], words[:, :1], words.long(), torch.zeros(2, 4).int()[:, ::2]):
        with pytest.raises(RuntimeError, match="bitmask is"):
            native.constrain(logits, wrong, masked)
    for wrong in (masked[:1], masked.int()):
        with pytest.raises(RuntimeError, match="masked is"):
            native.constrain(logits, words, wrong)


def test_what_does_not_fit_is_refused(native: NativeOps) -> None:
    rows = sampling_rows(2)
    native.sample(torch.zeros(2, 3), rows)
    with pytest.raises(RuntimeError, match=r"logits are \[2, 0\]"):
        native.sample(torch.zeros(2, 0), rows)
    with pytest.raises(RuntimeError, match=r"temperature is \[2\], not \[3\]"):
        native.sample(torch.zeros(3, 3), rows)
    with pytest.raises(RuntimeError):
        native.sample(torch.zeros(2, 3, dtype=torch.float64), rows)
    for name in SamplingRows._fields:
        wrong = rows._replace(**{name: getattr(rows, name).double()})
        with pytest.raises(RuntimeError, match=f"{name} is Double"):
            native.sample(torch.zeros(2, 3), wrong)
        wrong = rows._replace(**{name: getattr(rows, name)[:1]})
        with pytest.raises(RuntimeError, match=f"{name} is"):
            native.sample(torch.zeros(2, 3), wrong)
