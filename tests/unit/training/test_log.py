"""The course of a run: what is written is read again, and drawn."""

from pathlib import Path

import pytest

from training.acceptance import Acceptance
from training.evaluation import Row, make_table, to_json
from training.log import RunLog, measured, read_log
from training.progress import Progress, StepReport


def test_rows_of_steps(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.csv", 2)
    log.begin(0)
    report = StepReport(loss=3.25, right=(0.5, 0.25), num_positions=100, seconds=2.0)
    log.append(Progress(step=1, num_positions=100, elapsed_s=36), report, None)
    log.append(
        Progress(step=2, epoch=1, num_positions=200, elapsed_s=72),
        report,
        Acceptance(1.5, (0.4, 0.1)),
    )
    first, second = read_log(log.path)
    assert (first["hours"], first["positions_per_s"], first["right_2"]) == (
        "0.0100",
        "50",
        "0.2500",
    )
    assert first["accepted_1"] == ""
    assert measured([first, second]) == [second]
    assert (second["acceptance_length"], second["accepted_1"]) == ("1.5000", "0.4000")
    log.begin(1)
    assert read_log(log.path) == [first]


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    from training.plot import save_curve, save_evaluation

    log = RunLog(tmp_path / "log.csv", 1)
    log.begin(0)
    report = StepReport(loss=3.25, right=(0.5,), num_positions=100, seconds=2.0)
    log.append(Progress(step=1), report, Acceptance(1.5, (0.4,)))
    save_curve(read_log(log.path), tmp_path / "curve.png")
    rows = [Row("math", 1, 10, 15, (5, 0)), Row("all", 1, 10, 15, (5, 0))]
    save_evaluation({"a": rows, "b": rows}, tmp_path / "rows.svg")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "rows.svg").read_text()


def test_results_in_words_and_numbers() -> None:
    rows = [Row("math", 2, 3, 5, (2, 0)), Row("all", 2, 3, 5, (2, 0))]
    assert to_json({"a": rows})["a"][0] == {
        "category": "math",
        "prompts": 2,
        "verify_steps": 3,
        "acceptance_length": 1.6667,
        "accepted": [0.6667, 0.0],
    }
    assert make_table({"a": rows}).row_count == 2
