"""Samples are read from JSONL; what is malformed is named."""

import gzip
import json
from pathlib import Path

import pytest

from training.recipe import TrainingRefused
from training.samples import Sample, read_samples

ROW = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "temperature": 0.7, "category": "code"}


def test_rows_become_samples(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(json.dumps(ROW | {"id": "x"}) + '\n{"id": "y", "skipped": "it is empty"}\n')
    packed.write_bytes(gzip.compress(b'{"prompt_ids": [1], "response_ids": [2, 3]}\n'))
    first, second = read_samples([plain, packed])
    assert first == Sample(
        id="x", category="code", prompt_ids=(1, 2), response_ids=(3, 4, 5), temperature=0.7
    )
    assert (second.id, second.category, second.temperature) == ("b.jsonl.gz:1", "", 0.0)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt_ids": [1]}', '{"prompt_ids": "a"}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(TrainingRefused, match=r"a.jsonl:2: not "):
        read_samples([file])


@pytest.mark.parametrize(
    ("max_length", "expected"), [(9, (3, 4, 5)), (5, (3, 4, 5)), (4, (3, 4)), (3, None), (1, None)]
)
def test_long_samples_are_cut(max_length: int, expected: tuple[int, ...] | None) -> None:
    sample = Sample(
        id="", category="", prompt_ids=(1, 2), response_ids=(3, 4, 5), temperature=0
    ).cut(max_length)
    assert (sample and sample.response_ids) == expected
