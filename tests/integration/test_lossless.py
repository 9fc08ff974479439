"""The lossless benchmark as a user runs it, and that it sees what it is there to see."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from actors.llm import LLM, RequestOutput
from benchmarks import lossless

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "prompts",
    "mismatches",
    "excused",
    "mean_acceptance_length",
    "per_position_acceptance",
}


def test_the_demo_pair_is_lossless() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.lossless", "--prompts", "12", "--max-tokens", "24"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == KEYS
    assert result["prompts"] == 12
    assert result["mismatches"] == 0
    assert result["excused"] <= 1
    assert result["mean_acceptance_length"] > 1
    positions = result["per_position_acceptance"]
    # A draft is only accepted behind an accepted one.
    assert positions == sorted(positions, reverse=True)
    assert 1 + sum(positions) == pytest.approx(result["mean_acceptance_length"], abs=1e-3)


class OneTokenOff(LLM):
    """With a drafter, gets the third token of the first prompt wrong."""

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        first, *others = super().generate(*args, **kwargs)
        if self.config.drafter is not None:
            first = replace(first, token_ids=changed(first.token_ids, 2))
        return [first, *others]


def changed(token_ids: Sequence[int], index: int) -> tuple[int, ...]:
    return (*token_ids[:index], token_ids[index] + 1, *token_ids[index + 1 :])


def test_a_wrong_token_is_a_mismatch(
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lossless, "LLM", OneTokenOff)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "turns": ["abc" * i]}) + "\n" for i in (7, 8)))
    with pytest.raises(typer.Exit) as exit:
        lossless.main(
            file=file,
            prompts=None,
            max_tokens=5,
            dtype="float32",
            concurrency=2,
            model=str(tiny_pair[0]),
            drafter=str(tiny_pair[1]),
        )
    assert exit.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("MISMATCH: prompt 7, output token 2:")
    result = json.loads(lines[-1])
    assert (result["prompts"], result["mismatches"], result["excused"]) == (2, 1, 0)


def test_only_a_near_tie_is_excused() -> None:
    found = [
        lossless.Divergence(prompt_id="a", index=0, plain=1, speculative=2, margin=margin)
        for margin in (0.9e-5, 1.1e-5)
    ]
    assert [divergence.excused for divergence in found] == [True, False]


def test_an_output_that_ends_early_differs() -> None:
    assert lossless.first_difference([1, 2, 3], [1, 2]) == 2
    assert lossless.first_difference([1, 2], [1, 2]) is None
