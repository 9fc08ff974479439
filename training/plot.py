"""Pictures: the course of a run, and acceptance of several drafters side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from training.evaluation import Row
from training.log import measured

_SIZE = (11, 4.5)


def save_curve(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Left the loss, right the acceptance length on held-out responses, against hours."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    loss, acceptance = figure.subplots(1, 2)
    hours = [float(row["hours"]) for row in rows]
    loss.plot(hours, [float(row["loss"]) for row in rows], linewidth=0.8)
    loss.set_title("loss")
    points = measured(rows)
    acceptance.plot(
        [float(row["hours"]) for row in points],
        [float(row["acceptance_length"]) for row in points],
        marker="o",
        markersize=3,
    )
    acceptance.set_title("acceptance length, held-out responses")
    for axes in (loss, acceptance):
        axes.set_xlabel("hours")
    figure.savefig(path, dpi=120)


def save_evaluation(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Left acceptance length by category, right the share of steps that accept each draft; a
    colour for each drafter. The name's ending picks the format."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    lengths, drafts = figure.subplots(1, 2)
    categories = [row.category for row in next(iter(rows.values()))]
    height = 0.8 / len(rows)
    for i, (name, each) in enumerate(rows.items()):
        places = [place + i * height for place in range(len(categories))]
        lengths.barh(places, [row.acceptance_length for row in each], height, label=name)
        whole = next(row for row in each if row.category == "all")
        drafts.plot(range(1, len(whole.shares) + 1), whole.shares, marker="o", label=name)
    lengths.set_yticks([i + 0.4 - height / 2 for i in range(len(categories))], categories)
    lengths.invert_yaxis()
    lengths.set_xlim(left=1)
    lengths.set_title("acceptance length")
    drafts.set_title("share of steps that accept draft j")
    drafts.set_xlabel("j")
    drafts.set_ylim(bottom=0)
    lengths.legend()
    figure.savefig(path, dpi=150)
