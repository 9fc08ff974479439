"""The target against transformers, whole and in chunks, on one rank and on several."""

import pytest
import torch
from torch import Tensor

from models.kv_cache import LayerKV, allocate
from models.parallel import TensorParallel
from models.target import Target
from tests.oracle.dflash_reference import run_target
from tests.tiny import KINDS, Kind, load_target
from tests.unit.models.conftest import PROMPT, PairMaker
from tests.unit.models.ranks import feed, load_target_rank, run_ranks

PAGE = 4
TABLE = torch.tensor([3, 1, 5, 2, 6, 4, 7], dtype=torch.int32)
TOKENS = [*PROMPT, 299, 0, 7, 7, 250, 41, 3, 13]


def pool(target: Target) -> list[LayerKV]:
    return allocate(target.kv_specs(), num_pages=8, page_size=PAGE)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest magnitude: as near as float32 gets in another order."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_captured_states_equal_those_of_transformers(
    pair: PairMaker, kind: Kind, biases: bool
) -> None:
    directory, _ = pair(kind, biases=biases)
    layer_ids = (0, 2, 3)
    logits, hidden_states = run_target(load_target(directory), TOKENS)
    target = load_target_rank(directory, capture=[i + 1 for i in layer_ids])
    hidden, aux = feed(target, pool(target), TABLE, TOKENS)
    assert_near(target.logits(hidden), logits)
    assert aux.shape == (len(TOKENS), 3 * 32)
    for part, layer_id in zip(aux.split(32, dim=-1), layer_ids, strict=True):
        assert_near(part, hidden_states[layer_id + 1][0])


def test_nothing_is_captured_unless_asked(pair: PairMaker) -> None:
    target = load_target_rank(pair("llama")[0])
    _, aux = feed(target, pool(target), TABLE, TOKENS)
    assert aux.shape == (len(TOKENS), 0)


@pytest.mark.parametrize("chunks", [[1] * 19, [4, 4, 4, 4, 3], [3, 10, 6], [18, 1]])
def test_chunked_prefill_equals_whole(pair: PairMaker, chunks: list[int]) -> None:
    target = load_target_rank(pair("qwen3")[0], capture=(1, 4))
    whole, in_chunks = pool(target), pool(target)
    hidden, aux = feed(target, whole, TABLE, TOKENS)
    results, start = [], 0
    for chunk in chunks:
        results.append(feed(target, in_chunks, TABLE, TOKENS[start : start + chunk], start))
        start += chunk
    assert start == len(TOKENS)
    assert_near(torch.cat([h for h, _ in results]), hidden)
    assert_near(torch.cat([a for _, a in results]), aux)
    for one, other in zip(whole, in_chunks, strict=True):
        assert one.k.any()
        assert_near(other.k, one.k)
        assert_near(other.v, one.v)


def test_two_requests_in_one_run_do_not_see_each_other(pair: PairMaker) -> None:
    target = load_target_rank(pair("llama3")[0])
    kv = pool(target)
    alone, _ = feed(target, pool(target), TABLE[:3], PROMPT)
    feed(target, kv, TABLE[3:], TOKENS[::-1][:16])
    shared, _ = feed(target, kv, TABLE[:3], PROMPT)
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_every_tensor_parallel_size_computes_the_same(
    pair: PairMaker, kind: Kind, size: int
) -> None:
    directory, _ = pair(
        kind,
        num_heads=9,
        num_kv_heads=3,
        hidden_size=45,
        intermediate_size=65,
        vocab_size=301,
        biases=True,
    )

    def work(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        target = load_target_rank(directory, tp=tp, capture=(1, 4))
        hidden, aux = feed(target, pool(target), TABLE, TOKENS)
        return target.logits(hidden), aux

    ((logits, aux),) = run_ranks(1, work)
    ranks = run_ranks(size, work)
    joined = torch.cat([rank_logits for rank_logits, _ in ranks], dim=-1)
    assert_near(joined[:, :301], logits)
    assert (joined[:, 301:] == float("-inf")).all()
    for _, rank_aux in ranks:
        assert torch.equal(rank_aux, ranks[0][1]), "the same residual stream on every rank"
        assert_near(rank_aux, aux)
