"""What steps with speculation emit, at every place of a block, has the exact distribution.

`tests/integration/test_distribution.py` has all ways to sample, and compiled steps.
"""

import pytest

from actors.messages import SamplingParams
from tests.tiny import load_target
from tests.unit.models import block_draws
from tests.unit.models.conftest import Pair


@pytest.fixture(scope="module")
def three_tokens(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return block_draws.three_token_pair(tmp_path_factory.mktemp("three-tokens"))


@pytest.mark.parametrize(
    "sampling", [block_draws.SAMPLINGS[0], block_draws.SAMPLINGS[-1]], ids=["plain", "processed"]
)
def test_every_place_of_a_block_has_the_distribution(
    three_tokens: Pair, sampling: SamplingParams
) -> None:
    drawn = block_draws.drawn_at_every_place(block_draws.load_rank(three_tokens), sampling)
    block_draws.assert_exact(load_target(three_tokens[0]).double(), sampling, drawn)
