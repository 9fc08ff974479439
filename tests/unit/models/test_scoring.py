"""Logits apart from the engine against transformers."""

import pytest
import torch

from models.scoring import next_token_logits
from tests.oracle.dflash_reference import run_target
from tests.tiny import Kind, load_target
from tests.unit.models.conftest import PROMPT, PairMaker
from tests.unit.models.ranks import load_target_rank


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_logits_equal_those_of_transformers(pair: PairMaker, kind: Kind) -> None:
    directory, _ = pair(kind)
    target, theirs = load_target_rank(directory), load_target(directory)
    for length in (1, len(PROMPT)):
        logits = next_token_logits(target, PROMPT[:length])
        expected = run_target(theirs, PROMPT[:length])[0][-1]
        assert logits.dtype == torch.float32
        assert logits.shape == expected.shape
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )
