"""The benchmark as a whole: who takes which turn, and the command on a tiny pair."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import speed
from benchmarks.http_load import HttpLoad
from benchmarks.load import Cell, Mode, Sample, Source

SAMPLE = Sample(submitted_at=0.0, first_token_at=1.0, finished_at=2.0, num_tokens=2)


class LoggingLoad:
    """Writes down what it is asked, and answers with as many samples as prompts."""

    source: Source = "engine"

    def __init__(self, mode: Mode, log: list[Any]) -> None:
        self.mode: Mode = mode
        self._log = log

    def run(
        self,
        texts: Sequence[str],
        max_tokens: int,
        concurrency: int,
        on_finish: Callable[[], None],
    ) -> tuple[Sample, ...]:
        self._log.append((self.mode, "".join(texts), max_tokens, concurrency))
        on_finish()
        return (SAMPLE,) * len(texts)


def test_modes_take_turns() -> None:
    log: list[Any] = []
    floor: Any = SimpleNamespace(measure=lambda: log.append("floor"))
    finished: list[None] = []
    results = speed.measure(
        [LoggingLoad("off", log), LoggingLoad("dflash", log)],
        floor,
        ["a", "b"],
        concurrency=[1, 3],
        rounds=2,
        max_tokens=20,
        on_finish=lambda: finished.append(None),
    )
    turns: list[Any] = []
    for level, warm_up, texts in ((1, "a", "ab"), (3, "aba", "aba")):
        turns += [("off", warm_up, 8, level), ("dflash", warm_up, 8, level)]
        turns += ["floor", ("off", texts, 20, level), ("dflash", texts, 20, level)] * 2
    assert log == turns
    assert len(finished) == 8  # warm-ups are no progress
    modes: tuple[Mode, Mode] = ("off", "dflash")
    assert list(results) == [Cell("engine", m, level) for level in (1, 3) for m in modes]
    assert [len(samples) for samples in results[Cell("engine", "off", 3)]] == [3, 3]


def invoke(*args: str) -> Result:
    app = typer.Typer()
    app.command()(speed.main)
    return CliRunner().invoke(app, list(args))


def tiny(pair: tuple[Path, Path], tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n{"turns": ["three"]}\n')
    args = ["--model", str(pair[0]), "--drafter", str(pair[1]), "--dtype", "float32"]
    return [*args, "--file", str(file), "--prompts", "2", "--max-tokens", "4"]


def test_a_tiny_pair_in_process(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plot = tmp_path / "speed.png"
    done = invoke(*tiny(pair, tmp_path), "--concurrency", "2,1", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["rows"]
    assert [(row["mode"], row["concurrency"]) for row in rows] == [
        ("off", 1),
        ("dflash", 1),
        ("off", 2),
        ("dflash", 2),
    ]
    assert all(row["tok_s"] > 0 and row["ttft_p50_ms"] > 0 for row in rows)
    assert rows[0]["ratio_to_off"] == 1
    # 1 to K + 1 tokens of a verify step, and no such thing with speculation off.
    assert 1 <= rows[1]["acceptance_length"] <= 5
    assert rows[0]["acceptance_length"] is None
    if result["floor_ms"] is not None:
        expected = rows[0]["tok_s"] * result["floor_ms"] / 1000
        assert rows[0]["ratio_to_floor"] == pytest.approx(expected, rel=0.05, abs=1e-4)
    assert plot.stat().st_size > 0


def test_engine_and_server_side_by_side(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        choices = [{"delta": {"content": "a"}, "finish_reason": "stop"}]
        event = {"choices": choices, "usage": {"completion_tokens": 3}}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\n")

    urls: list[str] = []

    def http_load(mode: Mode, url: str) -> HttpLoad:
        urls.append(url)
        return HttpLoad(mode, url, httpx.MockTransport(answer))

    monkeypatch.setattr(speed, "HttpLoad", http_load)
    common = [*tiny(pair, tmp_path), "--modes", "off", "--concurrency", "1"]
    done = invoke(*common, "--url", "http://h:1", "--engine")
    assert done.exit_code == 0, done.output
    engine, http = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (engine["source"], http["source"]) == ("engine", "http")
    assert http["ratio_to_engine"] == pytest.approx(http["tok_s"] / engine["tok_s"], rel=1e-3)
    done = invoke(*common, "--url", "http://h:2")
    (http,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (http["source"], http["ratio_to_engine"]) == ("http", None)
    assert urls == ["http://h:1", "http://h:2"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--modes", "fast"], 2, "--modes: mode 'fast' is none of off, dflash"),
        (["--concurrency", "0"], 2, "--concurrency: '0' is not a whole number"),
        (["--url", "localhost:8000", "--modes", "off"], 2, "--url: 'localhost:8000' is not http"),
        (["--rounds", "1"], 2, "--rounds"),
        (["--model", "nowhere"], 1, "speed: model 'nowhere' is unknown"),
    ],
)
def test_bad_options_end_it_before_it_starts(args: list[str], code: int, message: str) -> None:
    done = invoke(*args)
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stdout == ""


def test_options_reach_the_engine_only_where_given(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(**args: Any) -> None:
        asked.append(args)
        raise speed.ConfigError("no engine here")

    monkeypatch.setattr(speed, "LLM", refuse)
    assert invoke(*tiny(pair, tmp_path)).exit_code == 1
    options = ["--no-exact", "--async-scheduling", "--max-model-len", "99"]
    assert invoke(*tiny(pair, tmp_path), *options).exit_code == 1
    default, chosen = asked
    assert chosen == default | {"exact": False, "async_scheduling": True, "max_model_len": 99}


def test_each_engine_saves_a_trace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Trace:
        def save(self, path: Path) -> None:
            log.append(path)

    class FakeLLM:
        def __init__(self, **args: Any) -> None:
            assert isinstance(args["trace"], Trace)

        def warm_up(self) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            log.append("ended")

    monkeypatch.setattr(speed, "Trace", Trace)
    monkeypatch.setattr(speed, "LLM", FakeLLM)
    with speed._engine("off", {}, speed._of(Path("a/trace.json"), "off")):
        log.append("running")
    assert log == ["running", "ended", Path("a/trace-off.json")]
    assert speed._of(None, "off") is None
