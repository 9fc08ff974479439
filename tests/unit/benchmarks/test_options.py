"""Options are judged in one line that names option, value and limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import options
from benchmarks.load import Mode

BOTH: list[Mode] = ["off", "dflash"]


def test_lists_are_parsed() -> None:
    assert options.parse_modes("dflash, off") == ["dflash", "off"]
    assert options.parse_concurrency("8,1, 2") == [1, 2, 8]


def test_a_url_goes_to_its_mode() -> None:
    parse = options.parse_urls
    assert parse(None, BOTH, engine=True) == {}
    assert parse("http://h:1/", ["dflash"], engine=False) == {"dflash": "http://h:1"}
    assert parse("http://h/?a=b", ["off"], engine=False) == {"off": "http://h/?a=b"}
    two = parse("off=http://h:1,dflash=https://h:2", BOTH, engine=False)
    assert two == {"off": "http://h:1", "dflash": "https://h:2"}
    assert parse("off=http://h:1", BOTH, engine=True) == {"off": "http://h:1"}


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (lambda: options.parse_modes("off,eagle"), "--modes: mode 'eagle' is none of off, dflash"),
        (lambda: options.parse_modes(""), "--modes: mode '' is none of off, dflash"),
        (lambda: options.parse_modes("off,off"), "--modes: off is given twice, once is the limit"),
        (
            lambda: options.parse_concurrency("1,0"),
            "--concurrency: '0' is not a whole number of at least 1",
        ),
        (
            lambda: options.parse_concurrency("-2"),
            "--concurrency: '-2' is not a whole number of at least 1",
        ),
        (
            lambda: options.parse_concurrency("1,,2"),
            "--concurrency: '' is not a whole number of at least 1",
        ),
        (lambda: options.parse_concurrency("2,2"), "--concurrency: 2 is given twice"),
        (
            lambda: options.parse_urls("ftp://h", ["off"], engine=False),
            "--url: 'ftp://h' is not http://host:port or https://host:port",
        ),
        (lambda: options.parse_urls("off=h:1", ["off"], engine=False), "--url: 'h:1' is not http"),
        (
            lambda: options.parse_urls("http://h", BOTH, engine=True),
            "--url: 'http://h' does not say its mode",
        ),
        (
            lambda: options.parse_urls("http://a,http://b", ["off"], engine=False),
            "--url: 'http://a' does not say its mode",
        ),
        (
            lambda: options.parse_urls("off=http://h", ["dflash"], engine=True),
            "--url: 'off=http://h' is for mode off, --modes is dflash",
        ),
        (
            lambda: options.parse_urls("off=http://a,off=http://b", BOTH, engine=True),
            "--url: mode off has two urls",
        ),
        (
            lambda: options.parse_urls("off=http://h", BOTH, engine=False),
            "--url: there is none for mode dflash, and --engine is not given",
        ),
        (
            lambda: options.check_dtype("float16"),
            "--dtype: 'float16' is none of float32, bfloat16",
        ),
        (
            lambda: options.check_plot(Path("a.gif")),
            "--plot: 'a.gif' does not end in png, svg, pdf",
        ),
        (
            lambda: options.check_plot(Path("nowhere/a.png")),
            "--plot: 'nowhere/a.png' is in a folder that does not exist",
        ),
        (
            lambda: options.check_engine_only({"--trace": None, "--exact": False}, engine=False),
            "--exact: it is for engines in this process",
        ),
        (lambda: options.read_texts(Path("nowhere"), None), "--file: nowhere: No such file"),
    ],
)
def test_what_is_wrong_is_one_line(parse: Callable[[], Any], message: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse()
    said = caught.value.format_message().removeprefix("Invalid value for ")
    assert said.startswith(message)
    assert "\n" not in said


def test_what_can_be_done_passes(tmp_path: Path) -> None:
    assert options.check_dtype("float32") == "float32"
    options.check_plot(None)
    options.check_plot(tmp_path / "a.svg")
    options.check_engine_only({"--exact": None}, engine=False)
    options.check_engine_only({"--exact": True}, engine=True)


def test_prompts_are_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n')
    assert options.read_texts(file, None) == ["a", "c"]
    assert options.read_texts(file, 1) == ["a"]


@pytest.mark.parametrize(("text", "message"), [("", "has no rows"), ('{"turn": 1}', ":1: not a")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(typer.BadParameter, match=message):
        options.read_texts(file, None)
