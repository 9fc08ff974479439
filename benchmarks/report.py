"""The rows of the speed benchmark's result: rates, latencies and ratios, as a table and as JSON."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.load import Cell, Mode, Sample, Source, tok_s

# For each cell the samples of every round; round i of all cells was measured side by side.
Rounds = Sequence[Sequence[Sample]]
Results = Mapping[Cell, Rounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mode at one concurrency, in process or over HTTP.

    `tok_s` is output tokens per second of wall time, the median of the rounds; `_min` and `_max`
    are over rounds. Latencies are over all requests of all rounds. `acceptance_length` is tokens
    per verify step, bonus included; None with speculation off. `ratio_to_off` and
    `ratio_to_engine` divide `tok_s` by that of mode off, or of the same mode in process, at the
    same concurrency; the former's `_min` and `_max` pair the rounds. `ratio_to_floor` is `tok_s`
    divided by `concurrency * 1000 / floor_ms`: what `concurrency` requests would get if every step
    gave each of them one token and took no longer than the matmuls of a single row. Ratios are None
    where the other side was not measured.
    """

    source: Source
    mode: Mode
    concurrency: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    acceptance_length: float | None
    ratio_to_off: float | None
    ratio_to_off_min: float | None
    ratio_to_off_max: float | None
    ratio_to_floor: float | None
    ratio_to_engine: float | None


def make_rows(results: Results, floor_ms: float | None) -> list[Row]:
    """One row for each cell, in the order of `results`."""
    return [_row(cell, results, floor_ms) for cell in results]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of `values` lie, interpolated linearly; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def json_line(rows: Sequence[Row], floor_ms: float | None) -> str:
    """The result in one line; numbers have four decimals."""
    rounded = [{name: _rounded(value) for name, value in asdict(row).items()} for row in rows]
    return json.dumps({"floor_ms": _rounded(floor_ms), "rows": rounded})


def make_table(rows: Sequence[Row], floor_ms: float | None) -> Table:
    """The result for a terminal of 80 columns."""
    floor = "not measured" if floor_ms is None else f"{floor_ms:.2f} ms"
    over_http = any(row.source == "http" for row in rows)
    titles = ["mode", "conc", "tok/s", "min-max", "TTFT\np50/p99", "TPOT\np50/p99", "accept"]
    titles += ["/off", "/floor", *(["/engine"] if over_http else [])]
    title = f"Latencies in ms; the floor of a step is {floor}"
    table = Table(title=title, box=SIMPLE, padding=0, show_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == "mode" else "right")
    for row in rows:
        table.add_row(
            row.mode if row.source == "engine" else f"{row.mode} HTTP",
            str(row.concurrency),
            _shown(row.tok_s, 1),
            f"{_shown(row.tok_s_min, 1)}-{_shown(row.tok_s_max, 1)}",
            f"{_shown(row.ttft_p50_ms, 1)}/{_shown(row.ttft_p99_ms, 1)}",
            f"{_shown(row.tpot_p50_ms, 1)}/{_shown(row.tpot_p99_ms, 1)}",
            _shown(row.acceptance_length),
            _shown(row.ratio_to_off),
            _shown(row.ratio_to_floor),
            *([_shown(row.ratio_to_engine)] if over_http else []),
        )
    return table


def _row(cell: Cell, results: Results, floor_ms: float | None) -> Row:
    rounds = results[cell]
    rates = _rates(rounds)
    rate = statistics.median(rates)
    off = _rates(results.get(cell._replace(mode="off"), ()))
    paired = [a / b for a, b in zip(rates, off, strict=True)] if off else []
    engine = _rates(results.get(cell._replace(source="engine"), ()))
    samples = [sample for round in rounds for sample in round]
    ttfts_ms = [1000 * sample.ttft_s for sample in samples]
    tpots_ms = [1000 * sample.tpot_s for sample in samples if sample.tpot_s is not None]
    ttft_p50_ms, ttft_p99_ms = percentile(ttfts_ms, 50), percentile(ttfts_ms, 99)
    assert ttft_p50_ms is not None
    assert ttft_p99_ms is not None
    return Row(
        source=cell.source,
        mode=cell.mode,
        concurrency=cell.concurrency,
        tok_s=rate,
        tok_s_min=min(rates),
        tok_s_max=max(rates),
        ttft_p50_ms=ttft_p50_ms,
        ttft_p99_ms=ttft_p99_ms,
        tpot_p50_ms=percentile(tpots_ms, 50),
        tpot_p99_ms=percentile(tpots_ms, 99),
        acceptance_length=None if cell.mode == "off" else _acceptance_length(samples),
        ratio_to_off=rate / statistics.median(off) if off else None,
        ratio_to_off_min=min(paired, default=None),
        ratio_to_off_max=max(paired, default=None),
        ratio_to_floor=rate * floor_ms / (1000 * cell.concurrency) if floor_ms else None,
        ratio_to_engine=rate / statistics.median(engine) if engine else None,
    )


def _rates(rounds: Rounds) -> list[float]:
    return [tok_s(samples) for samples in rounds]


def _acceptance_length(samples: Sequence[Sample]) -> float | None:
    steps = sum(sample.verify_steps for sample in samples)
    return sum(sample.emitted_tokens for sample in samples) / steps if steps else None


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def _shown(value: float | None, decimals: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{decimals if value < 100 else 0}f}"
