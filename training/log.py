"""The course of a run: a CSV row for every step, and a picture of it."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.acceptance import Acceptance
from training.progress import Progress, StepReport

_COLUMNS = ["step", "epoch", "hours", "positions", "loss", "positions_per_s", "acceptance_length"]


@dataclass(frozen=True, slots=True)
class RunLog:
    """`log.csv`: `right_j` is the share of draft j's labels that were right among the candidates;
    `acceptance_length` and `accepted_j`, on held-out responses, stand where they were measured."""

    path: Path
    num_drafts: int

    @property
    def columns(self) -> list[str]:
        drafts = range(1, self.num_drafts + 1)
        return [
            *_COLUMNS,
            *(f"right_{j}" for j in drafts),
            *(f"accepted_{j}" for j in drafts),
        ]

    def begin(self, step: int) -> None:
        """Keep only rows up to `step`: a resumed run writes the later ones again."""
        rows = read_log(self.path) if self.path.is_file() else []
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["step"]) <= step)

    def append(self, progress: Progress, report: StepReport, acceptance: Acceptance | None) -> None:
        values: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch,
            "hours": f"{progress.elapsed_s / 3600:.4f}",
            "positions": progress.num_positions,
            "loss": f"{report.loss:.4f}",
            "positions_per_s": f"{report.num_positions / report.seconds:.0f}",
        }
        for j, share in enumerate(report.right, start=1):
            values[f"right_{j}"] = f"{share:.4f}"
        if acceptance is not None:
            values["acceptance_length"] = f"{acceptance.length:.4f}"
            for j, share in enumerate(acceptance.at, start=1):
                values[f"accepted_{j}"] = f"{share:.4f}"
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow(values)


def read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a `log.csv`."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The rows where acceptance was measured."""
    return [row for row in rows if row["acceptance_length"]]
