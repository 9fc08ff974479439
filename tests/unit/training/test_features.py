"""The cache of captured states survives interrupts and refuses what is not its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from training.features import FeatureCache, Features
from training.recipe import TrainingRefused

WIDTH, TOP_K = 6, 2
SEQUENCES = [(1, 2, 3), (4, 5), (1, 2, 3, 4)]


def features(tokens: Sequence[int]) -> Features:
    rows = len(tokens) - 1
    values = torch.tensor(tokens[:-1], dtype=torch.float32).unsqueeze(1)
    return Features(
        (values + torch.arange(WIDTH) / 8).bfloat16(),
        (values + torch.arange(TOP_K)).int(),
        torch.full((rows, TOP_K), 1 / sum(tokens)),
    )


def open_cache(directory: Path, **changes: Any) -> FeatureCache:
    options: dict[str, Any] = {
        "signature": {"captured": [1, 2]},
        "width": WIDTH,
        "dtype": torch.bfloat16,
        "top_k": TOP_K,
    }
    return FeatureCache(directory, **options | changes)


def check(cache: FeatureCache) -> None:
    for tokens in SEQUENCES:
        found, expected = cache.get(tokens), features(tokens)
        assert torch.equal(found.aux, expected.aux)
        assert torch.equal(found.top_ids, expected.top_ids)
        assert torch.equal(found.top_probs, expected.top_probs)


def test_what_was_computed_is_read_again(tmp_path: Path) -> None:
    computed: list[Sequence[int]] = []

    def compute(tokens: Sequence[int]) -> Features:
        computed.append(tokens)
        return features(tokens)

    open_cache(tmp_path).fill(SEQUENCES[:2], compute, lambda: None)
    cache = open_cache(tmp_path)
    cache.fill([*SEQUENCES, SEQUENCES[0]], compute, lambda: None)
    assert computed == SEQUENCES
    check(cache)
    check(open_cache(tmp_path))


@pytest.mark.parametrize("stage", ["values", "index"])
def test_an_interrupt_costs_only_what_it_cut_off(tmp_path: Path, stage: str) -> None:
    cache = open_cache(tmp_path)
    cache.fill(SEQUENCES[:2], features, lambda: None)
    if stage == "values":
        with (tmp_path / "values.bin").open("ab") as file:
            file.write(b"half of a record")
    else:
        with (tmp_path / "index.jsonl").open("a") as lines:
            lines.write('{"key": "half of')
    cache = open_cache(tmp_path)
    assert SEQUENCES[1] in cache
    assert SEQUENCES[2] not in cache
    cache.fill(SEQUENCES, features, lambda: None)
    check(open_cache(tmp_path))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"signature": {"captured": [1, 3]}}, "captured"),
        ({"width": 7}, "width"),
        ({"dtype": torch.float32}, "dtype"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_another_targets_folder_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    open_cache(tmp_path)
    with pytest.raises(TrainingRefused, match=f"holds features with {name}"):
        open_cache(tmp_path, **changes)


def test_a_full_disk_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path)
    monkeypatch.setattr("training.features._SPARE_BYTES", 1 << 60)
    with pytest.raises(TrainingRefused, match=r"the features take 0\.0 GB"):
        cache.fill(SEQUENCES, features, lambda: None)
