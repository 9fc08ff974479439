"""The walk through held-out responses is the one that serving takes."""

from pathlib import Path

import pytest
import torch

from tests.oracle.dflash_reference import generate, load_drafter
from tests.tiny import load_target as load_reference
from tests.tiny import make_pair, train_pair
from training.acceptance import measure, right_drafts, walk
from training.blocks import Anchored
from training.features import capture
from training.pair import load_pair, load_target

PROMPT, NUM_TOKENS = [3, 14, 15, 92, 65, 35, 8, 97, 93, 23, 84], 30


@pytest.mark.parametrize(
    ("num_right", "expected"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        # From anchor 2: one draft is right, so the next anchor is 4.
        ([1, 9, 0, 0], [1, 0, 0]),
        # Four tokens follow the first, one of which is no draft.
        ([9, 9, 9, 9], [3]),
        ([0, 9, 9, 9], [0, 2]),
    ],
)
def test_walk(num_right: list[int], expected: list[int]) -> None:
    assert list(walk(num_right, 2, 7)) == expected


def test_acceptance_is_the_oracles(tmp_path: Path) -> None:
    target_dir, drafter_dir = make_pair(tmp_path, "qwen3")
    train_pair(target_dir, drafter_dir, [PROMPT, PROMPT[::-1]])
    oracle = load_drafter(drafter_dir)
    trace = generate(load_reference(target_dir), oracle, PROMPT, NUM_TOKENS)
    assert 1.3 < trace.mean_acceptance_length < 4.7, "or the test says little"
    target = load_target(target_dir, (1, 3, 4), torch.float32, 64, torch.device("cpu"))
    pair = load_pair(drafter_dir, target, 64)
    tokens = [*PROMPT, *trace.token_ids]
    sequence = Anchored(tokens, (), capture(target, tokens, 0).aux)
    found = measure(pair, [(len(PROMPT), sequence)])
    assert found.length == pytest.approx(trace.mean_acceptance_length)
    emitted = [len(step.emitted) for step in trace.steps]
    expected = [sum(n - 1 > j for n in emitted) / len(emitted) for j in range(4)]
    assert found.at == pytest.approx(expected)


def test_right_drafts_in_several_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_dir, drafter_dir = make_pair(tmp_path, "llama")
    target = load_target(target_dir, (1, 3, 4), torch.float32, 64, torch.device("cpu"))
    pair = load_pair(drafter_dir, target, 64)
    tokens = list(range(20, 50))
    sequence = Anchored(tokens, range(5, 29), capture(target, tokens, 0).aux)
    whole = right_drafts(pair, sequence)
    monkeypatch.setattr("training.acceptance._BLOCKS_AT_ONCE", 7)
    assert right_drafts(pair, sequence) == whole
