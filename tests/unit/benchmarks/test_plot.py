"""What is drawn, read back from the figure."""

from pathlib import Path

import pytest

from benchmarks.load import Cell, Sample
from benchmarks.plot import draw, save_plot
from benchmarks.report import Row, make_rows


def run(rate: float) -> list[Sample]:
    return [Sample(submitted_at=0.0, first_token_at=0.1, finished_at=12 / rate, num_tokens=12)]


@pytest.fixture
def rows() -> list[Row]:
    results = {
        Cell("engine", "off", 1): [run(2.0), run(4.0)],
        Cell("engine", "dflash", 1): [run(4.0), run(6.0)],
        Cell("engine", "off", 8): [run(12.0), run(12.0)],
        Cell("engine", "dflash", 8): [run(6.0), run(12.0)],
        Cell("http", "dflash", 1): [run(1.0), run(1.0)],
    }
    return make_rows(results, None)


def test_both_panels_show_values_and_spread(rows: list[Row]) -> None:
    rate, ratio = draw(rows).axes
    assert rate.get_legend_handles_labels()[1] == ["off", "dflash", "dflash, HTTP"]
    assert ratio.get_legend_handles_labels()[1] == ["dflash"]
    (line, _, (bars,)) = rate.containers[1].lines
    assert line.get_xydata().tolist() == [[1, 5.0], [8, 9.0]]
    assert [bar.tolist() for bar in bars.get_segments()] == [[[1, 4], [1, 6]], [[8, 6], [8, 12]]]
    (line, _, (bars,)) = ratio.containers[0].lines
    assert line.get_ydata().tolist() == pytest.approx([5 / 3, 0.75])
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_the_name_picks_the_format(
    rows: list[Row], tmp_path: Path, name: str, magic: bytes
) -> None:
    save_plot(rows, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
