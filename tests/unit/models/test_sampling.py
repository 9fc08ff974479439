"""Draws against a loop over tokens and against the exact distribution; log-probabilities."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers import LMHead
from models.sampling import SamplingRows, log_probs, sample
from tests.unit.models.draws import (
    chi_square,
    distribution,
    kept_tokens,
    noise,
    random_seeds,
    sampling_rows,
)
from tests.unit.models.ranks import run_heads

SIZES = (1, 2, 3)
DRAWS = 100_000
# Of all chi-square tests here together, one in a hundred would fail by chance, were the seeds not
# fixed.
LEAST_P = 0.01 / 40


def ints(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(logits: Tensor, rows: SamplingRows, size: int = 1) -> Tensor:
    """`sample` on ranks that must agree."""
    found = run_heads(logits, size, lambda local, head: sample(local, rows, head))
    assert all(torch.equal(ids, found[0]) for ids in found)
    assert found[0].dtype == torch.int32
    return found[0]


def random_rows(rng: random.Random, count: int) -> SamplingRows:
    def floats(*values: float) -> Tensor:
        return torch.tensor(rng.choices(values, k=count))

    return SamplingRows(
        temperature=floats(0.0, 1e-6, 0.1, 0.7, 1.0, 2.0, 50.0),
        top_p=floats(1.0, 1.0, 0.95, 0.5, 1e-3),
        min_p=floats(0.0, 0.0, 0.05, 0.6, 1.0),
        top_k=ints(rng.choices([0, 0, 1, 2, 5, 40, 10_000], k=count)),
        seeds=random_seeds(count, rng.randrange(2**32)),
        positions=ints([rng.randrange(100_000) for _ in range(count)]),
    )


def pick(rows: SamplingRows, some: Tensor) -> SamplingRows:
    return SamplingRows(*(field[some] for field in rows))


def scores(logits: Tensor, rows: SamplingRows, row: int) -> list[float]:
    """What the choice of one row is the argmax of."""
    temperature = rows.temperature[row]
    if temperature == 0:
        return [float(value) for value in logits[row]]
    distances = ((logits[row].max() - logits[row]) / temperature).tolist()
    keep = kept_tokens(
        distances, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
    )
    seed, position = rows.seeds[row].tolist(), int(rows.positions[row])
    return [
        noise(seed, position, token) - distance if stays else -math.inf
        for token, (distance, stays) in enumerate(zip(distances, keep, strict=True))
    ]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 5), vocab_size=st.integers(1, 30))
def test_draws_equal_a_loop(seed: int, count: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    values = [-math.inf, -1e30, -3.0, -0.0, 0.0, 1e-3, 2.0, 2.5]
    if rng.random() < 0.5:
        values = [rng.gauss(0, 3) for _ in range(40)]
    logits = torch.tensor(rng.choices(values, k=count * vocab_size)).view(count, vocab_size)
    logits[:, rng.randrange(vocab_size)] = rng.choice([-5.0, 3.0])
    rows = random_rows(rng, count)
    found = draw(logits, rows)
    for row, token in enumerate(found.tolist()):
        expected = scores(logits, rows, row)
        best = max(expected)
        if rows.temperature[row] == 0:
            assert token == expected.index(best)
        else:
            assert expected[token] >= best - 1e-5
    for size in SIZES[1:]:
        assert torch.equal(draw(logits, rows, size), found)


def test_ranks_agree_on_a_large_vocabulary_without_gathering_it() -> None:
    rng, operands = random.Random(0), list[Tensor]()
    logits = 3 * torch.randn(200, 4099, generator=torch.Generator().manual_seed(0))
    rows = random_rows(rng, 200)
    expected = draw(logits, rows)
    assert len(expected.unique()) > 50
    for size in SIZES[1:]:
        assert torch.equal(draw(logits, rows, size), expected)
        run_heads(logits, size, lambda local, head: sample(local, rows, head), operands)
    assert max(operand.numel() for operand in operands) <= 2 * 200


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    logits = 3 * torch.randn(64, 1001, generator=torch.Generator().manual_seed(1))
    rows = random_rows(random.Random(1), 64)
    for dtype in (torch.float32, torch.bfloat16):
        together = draw(logits.to(dtype), rows)
        for row in range(64):
            one = torch.tensor([row])
            assert draw(logits[one].to(dtype), pick(rows, one)) == together[row]
        shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:33]
        found = draw(logits[shuffled].to(dtype), pick(rows, shuffled))
        assert torch.equal(found, together[shuffled])


def test_temperatures_mix() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(300, 4)
    rows = sampling_rows(300)._replace(
        temperature=torch.tensor([0.0, 1e-6, 1.0]).repeat(100), seeds=random_seeds(300)
    )
    greedy, cold, warm = draw(logits, rows).view(100, 3).T.tolist()
    assert set(greedy) == {1}
    assert set(cold) == {1, 2}
    assert set(warm) == {0, 1, 2, 3}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 1.0, 1e30])
def test_the_only_token_there_is_is_chosen(temperature: float, size: int) -> None:
    logits = torch.full((7, 7), -math.inf).fill_diagonal_(-1e30)
    for how in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}):
        rows = sampling_rows(7, temperature=temperature, **how)  # type: ignore[arg-type]
        assert draw(logits, rows, size).tolist() == list(range(7))


@pytest.mark.parametrize("size", SIZES)
def test_a_row_without_any_token_yields_a_token_of_the_vocabulary(size: int) -> None:
    logits = torch.full((2, 5), -math.inf)
    for temperature in (0.0, 1.0):
        rows = sampling_rows(2, temperature=temperature, top_p=0.9, top_k=2)
        assert draw(logits, rows, size).tolist() == [0, 0]


# ----------------------------------------------------------------------------------- distribution

THREE = torch.tensor([1.0, 0.0, 0.3])
FIFTY = 2 * torch.randn(50, generator=torch.Generator().manual_seed(3))
HOW: list[dict[str, float]] = [
    {},
    {"temperature": 0.1},
    {"temperature": 3.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def drawn(logits: Tensor, rows: SamplingRows, size: int = 1) -> Tensor:
    """How often each token was drawn from `logits [vocabulary]`."""
    ids = draw(logits.expand(len(rows.positions), -1), rows, size)
    return ids.bincount(minlength=len(logits))


@pytest.mark.parametrize("how", HOW, ids=repr)
@pytest.mark.parametrize("logits", [THREE, FIFTY], ids=len)
def test_draws_of_many_seeds_have_the_distribution(logits: Tensor, how: dict[str, float]) -> None:
    rows = sampling_rows(DRAWS, **how)  # type: ignore[arg-type]
    rows.seeds[:, 0] = torch.arange(DRAWS)
    assert chi_square(drawn(logits, rows), distribution(logits, rows)) > LEAST_P


@pytest.mark.parametrize("how", HOW, ids=repr)
def test_draws_at_many_positions_have_the_distribution(how: dict[str, float]) -> None:
    rows = sampling_rows(DRAWS, seed=7, **how)  # type: ignore[arg-type]
    rows = rows._replace(positions=torch.arange(DRAWS, dtype=torch.int32))
    assert chi_square(drawn(THREE, rows), distribution(THREE, rows)) > LEAST_P


@pytest.mark.parametrize("size", SIZES[1:])
def test_draws_of_several_ranks_have_the_distribution(size: int) -> None:
    rows = sampling_rows(DRAWS, temperature=0.8, top_p=0.9)._replace(seeds=random_seeds(DRAWS))
    assert chi_square(drawn(FIFTY, rows, size), distribution(FIFTY, rows)) > LEAST_P


def test_draws_from_bfloat16_logits_have_their_distribution() -> None:
    rows = sampling_rows(DRAWS, top_k=30)._replace(seeds=random_seeds(DRAWS))
    logits = FIFTY.bfloat16()
    assert chi_square(drawn(logits, rows), distribution(logits, rows)) > LEAST_P
    assert chi_square(drawn(logits, rows), distribution(logits.float(), rows)) > LEAST_P


@pytest.mark.parametrize("logits", [THREE, FIFTY], ids=len)
def test_the_test_sees_a_fiftieth_of_the_probability_moved(logits: Tensor) -> None:
    rows = sampling_rows(DRAWS)
    rows.seeds[:, 0] = torch.arange(DRAWS)
    counts, wrong = drawn(logits, rows), distribution(logits, rows)
    best, second = wrong.argsort(descending=True)[:2]
    wrong[best] -= 0.02
    wrong[second] += 0.02
    assert chi_square(counts, wrong) < 1e-9


# ------------------------------------------------------------------------------ log-probabilities


def tell(
    logits: Tensor, ids: Tensor, num_top: int, operands: list[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`log_probs` on one rank, after a check that it is the same on several."""

    def work(local: Tensor, head: LMHead) -> tuple[Tensor, ...]:
        return log_probs(local, ids, head, num_top)

    (expected,) = run_heads(logits, 1, work)
    for size in SIZES[1:]:
        for found in run_heads(logits, size, work, operands):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
    return expected


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4), vocab_size=st.integers(1, 12))
def test_log_probabilities_equal_a_loop(seed: int, count: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    values = [-30.0, -1.0, -0.0, 0.0, 2.0] if rng.random() < 0.5 else [-math.inf, 4.0, 5.0, 5.0]
    logits = torch.tensor(rng.choices(values, k=count * vocab_size)).view(count, vocab_size)
    logits[:, rng.randrange(vocab_size)] = 5.0
    ids = ints([rng.randrange(vocab_size) for _ in range(count)])
    num_top = rng.randrange(vocab_size + 1)
    logprobs, ranks, top_ids, top = tell(logits, ids, num_top)
    assert [t.dtype for t in (logprobs, ranks, top_ids, top)] == [
        torch.float32,
        torch.int32,
        torch.int32,
        torch.float32,
    ]
    assert top_ids.shape == top.shape == (count, num_top)
    for row in range(count):
        given_id, values = int(ids[row]), logits[row].tolist()
        normalizer = math.log(math.fsum(math.exp(value - 5) for value in values)) + 5
        order = sorted(range(vocab_size), key=lambda token: (-values[token], token))
        assert float(logprobs[row]) == pytest.approx(values[given_id] - normalizer, abs=2e-6)
        assert int(ranks[row]) == 1 + order.index(given_id)
        assert top_ids[row].tolist() == order[:num_top]
        wanted = [values[token] - normalizer for token in order[:num_top]]
        assert top[row].tolist() == pytest.approx(wanted, abs=2e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([0.0, 1.0, 4.0, 30.0]))
def test_log_probabilities_equal_those_of_float64(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, 5003, generator=generator)
    ids = torch.randint(0, 5003, (6,), generator=generator, dtype=torch.int32)
    operands: list[Tensor] = []
    logprobs, ranks, top_ids, top = tell(logits, ids, 20, operands)
    assert max(operand.numel() for operand in operands) <= 6 * 20
    exact = logits.double().log_softmax(1)
    wanted = exact.gather(1, ids.long().unsqueeze(1))
    torch.testing.assert_close(logprobs.double(), wanted.squeeze(1), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(top.double(), exact.topk(20).values, rtol=1e-6, atol=2e-6)
    if scale:
        assert torch.equal(ranks, 1 + (exact > wanted).sum(1).int())
    else:
        assert torch.equal(ranks, ids + 1)
        assert top_ids.tolist() == [list(range(20))] * 6


def test_log_probabilities_of_a_row_are_the_same_in_any_company() -> None:
    logits = 4 * torch.randn(40, 49152, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(40, dtype=torch.int32)

    def work(local: Tensor, head: LMHead, some: Tensor) -> tuple[Tensor, ...]:
        return log_probs(local[some], ids[some], head, 5)

    (together,) = run_heads(logits, 1, lambda local, head: work(local, head, torch.arange(40)))
    for some in (torch.tensor([3]), torch.tensor([39, 0, 7]), torch.arange(0, 40, 3)):
        (found,) = run_heads(logits, 1, lambda local, head, some=some: work(local, head, some))  # type: ignore[misc]
        for one, other in zip(found, together, strict=True):
            assert torch.equal(one, other[some])


def test_draws_and_log_probabilities_are_one_graph_each() -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))
    rows, ids = random_rows(random.Random(0), 4), ints([0, 1, 2, 32])

    def work(local: Tensor, head: LMHead) -> tuple[tuple[Tensor, ...], ...]:
        drawn, told = (
            torch.compile(f, fullgraph=True, backend="eager") for f in (sample, log_probs)
        )
        return (
            (drawn(local, rows, head), *told(local, ids, head, 3)),
            (sample(local, rows, head), *log_probs(local, ids, head, 3)),
        )

    ((compiled, plain),) = run_heads(logits, 1, work)
    for one, other in zip(compiled, plain, strict=True):
        assert torch.equal(one, other)
