"""Compiled steps with speculation emit, at every place of a block, the exact distribution."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from transformers import PreTrainedModel

from actors.messages import SamplingParams
from models.backends.cpu import CpuBackend
from models.steps import ModelRank
from tests.tiny import load_target
from tests.unit.models import block_draws
from tests.unit.models.conftest import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return block_draws.three_token_pair(tmp_path_factory.mktemp("three-tokens"))


@pytest.fixture(scope="module")
def target(pair: Pair) -> PreTrainedModel:
    return load_target(pair[0]).double()


@pytest.fixture(scope="module")
def compiled(pair: Pair) -> Iterator[tuple[CpuBackend, ModelRank]]:
    with closing(CpuBackend(1, exact=True)) as backend:
        yield backend, backend.submit(lambda: block_draws.load_rank(pair, backend)).result()


@pytest.mark.parametrize("sampling", block_draws.SAMPLINGS, ids=map(repr, block_draws.WAYS))
def test_every_place_of_a_block_has_the_distribution(
    compiled: tuple[CpuBackend, ModelRank], target: PreTrainedModel, sampling: SamplingParams
) -> None:
    backend, rank = compiled
    work = backend.submit(lambda: block_draws.drawn_at_every_place(rank, sampling))
    block_draws.assert_exact(target, sampling, work.result())
