"""Rows against values worked out by hand."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.load import Cell, Sample
from benchmarks.report import json_line, make_rows, make_table, percentile

KEYS = {
    "source",
    "mode",
    "concurrency",
    "tok_s",
    "tok_s_min",
    "tok_s_max",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "acceptance_length",
    "ratio_to_off",
    "ratio_to_off_min",
    "ratio_to_off_max",
    "ratio_to_floor",
    "ratio_to_engine",
}


def run(rate: float, *, ttft_s: float = 0.25, steps: int = 0, emitted: int = 0) -> list[Sample]:
    """One request of 10 tokens at `rate` tokens per second."""
    sample = Sample(
        submitted_at=0.0,
        first_token_at=ttft_s,
        finished_at=10 / rate,
        num_tokens=10,
        verify_steps=steps,
        emitted_tokens=emitted,
    )
    return [sample]


RESULTS = {
    Cell("engine", "off", 2): [run(5.0), run(4.0), run(2.5)],
    Cell("engine", "dflash", 2): [
        run(10.0, ttft_s=0.1, steps=3, emitted=9),
        run(5.0, ttft_s=0.2, steps=5, emitted=9),
        run(8.0, ttft_s=0.35, steps=4, emitted=9),
    ],
    Cell("http", "dflash", 2): [run(2.0), run(3.0), run(6.0)],
}


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_rates_are_medians_with_their_spread() -> None:
    _, dflash, _ = make_rows(RESULTS, 20.0)
    assert (dflash.tok_s, dflash.tok_s_min, dflash.tok_s_max) == (8.0, 5.0, 10.0)


def test_latencies_are_over_all_requests() -> None:
    _, dflash, _ = make_rows(RESULTS, 20.0)
    assert dflash.ttft_p50_ms == pytest.approx(200)
    assert dflash.ttft_p99_ms == pytest.approx(347)  # 0.98 of the way from 200 to 350
    # (1 - 0.1) / 9, (2 - 0.2) / 9 and (1.25 - 0.35) / 9 seconds.
    assert dflash.tpot_p50_ms == pytest.approx(100)
    assert dflash.tpot_p99_ms == pytest.approx(198)


def test_acceptance_is_per_verify_step_of_all_requests() -> None:
    off, dflash, http = make_rows(RESULTS, 20.0)
    assert dflash.acceptance_length == pytest.approx(27 / 12)
    assert off.acceptance_length is None
    assert http.acceptance_length is None  # it made no verify step


def test_a_plain_decode_step_is_no_verify_step() -> None:
    """Engines count those too."""
    (row,) = make_rows({Cell("engine", "off", 1): [run(5.0, steps=9, emitted=9)]}, None)
    assert row.acceptance_length is None


def test_ratios_are_between_medians_of_the_same_concurrency() -> None:
    off, dflash, http = make_rows(RESULTS | {Cell("engine", "off", 1): [run(99.0)]}, 20.0)[:3]
    assert off.ratio_to_off == 1.0
    assert dflash.ratio_to_off == 8.0 / 4.0
    # Round by round: 10 / 5, 5 / 4 and 8 / 2.5.
    assert dflash.ratio_to_off_min == pytest.approx(1.25)
    assert dflash.ratio_to_off_max == pytest.approx(3.2)
    assert http.ratio_to_off is None  # off was not measured over HTTP
    assert http.ratio_to_engine == 3.0 / 8.0


def test_the_floor_gives_each_request_a_token_per_step() -> None:
    """20 ms allow 50 steps a second, 100 tokens for two requests."""
    off, dflash, _ = make_rows(RESULTS, 20.0)
    assert off.ratio_to_floor == pytest.approx(0.04)
    assert dflash.ratio_to_floor == pytest.approx(0.08)
    assert make_rows(RESULTS, None)[0].ratio_to_floor is None


def test_the_line_is_json_with_all_keys() -> None:
    line = json_line(make_rows(RESULTS, 20.00004), 20.00004)
    assert "\n" not in line
    result = json.loads(line)
    assert set(result) == {"floor_ms", "rows"}
    assert result["floor_ms"] == 20.0
    assert all(set(row) == KEYS for row in result["rows"])
    assert [row["source"] for row in result["rows"]] == ["engine", "engine", "http"]
    assert [row["mode"] for row in result["rows"]] == ["off", "dflash", "dflash"]
    assert result["rows"][1]["ratio_to_off"] == 2.0
    assert json.loads(json_line([], None)) == {"floor_ms": None, "rows": []}


def test_the_table_fits_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(make_table(make_rows(RESULTS, 20.0), 20.0))
    (line,) = [line for line in out.getvalue().splitlines() if "HTTP" in line]
    shown = ["dflash", "HTTP", "2", "3.0", "2.0-6.0", "250/250", "343/524", "-", "-"]
    assert line.split() == [*shown, "0.03", "0.38"]
