"""The speed benchmark's picture: rate and ratio to off against concurrency."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Row


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Write tok/s and ratio to off per mode and source; bars span the rounds' least and most.

    The name's ending picks the format.
    """
    draw(rows).savefig(path, dpi=150)


def draw(rows: Sequence[Row]) -> Figure:
    """Left tok/s, right the ratio to off, with a line for each source and mode measured."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rate, ratio = figure.subplots(1, 2)
    for i, (source, mode) in enumerate(dict.fromkeys((row.source, row.mode) for row in rows)):
        series = sorted(
            (row for row in rows if (row.source, row.mode) == (source, mode)),
            key=lambda row: row.concurrency,
        )
        label = mode if source == "engine" else f"{mode}, HTTP"
        rates = [(r.concurrency, r.tok_s, r.tok_s_min, r.tok_s_max) for r in series]
        _line(rate, label, f"C{i}", rates)
        against_off = [
            (r.concurrency, r.ratio_to_off, r.ratio_to_off_min, r.ratio_to_off_max)
            for r in series
            if r.mode != "off"
        ]
        points = [(x, y, low, high) for x, y, low, high in against_off if y and low and high]
        if points:
            _line(ratio, label, f"C{i}", points)
    ratio.axhline(1.0, color="gray", linewidth=1)
    for axes, title in ((rate, "tok/s"), (ratio, "tok/s relative to off")):
        axes.set_title(title)
        axes.set_xlabel("requests in flight")
        axes.set_xscale("log", base=2)
        levels = sorted({row.concurrency for row in rows})
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def _line(
    axes: Axes, label: str, color: str, points: Sequence[tuple[int, float, float, float]]
) -> None:
    """`points` are (concurrency, value, least, most)."""
    axes.errorbar(
        [x for x, *_ in points],
        [y for _, y, *_ in points],
        yerr=[
            [max(0.0, y - low) for _, y, low, _ in points],  # a hair below 0 by rounding
            [max(0.0, high - y) for _, y, _, high in points],
        ],
        label=label,
        color=color,
        marker="o",
        capsize=3,
    )
