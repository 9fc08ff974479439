"""The speed benchmark's options: each is judged before anything is loaded or measured."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar, get_args
from urllib.parse import urlsplit

import typer

from actors.config import DType
from benchmarks.load import Mode
from benchmarks.prompts import load_prompts

T = TypeVar("T")

MODES: tuple[Mode, ...] = get_args(Mode)
DTYPES: tuple[DType, ...] = get_args(DType)
PLOT_FORMATS = ("png", "svg", "pdf")


def parse_modes(text: str) -> list[Mode]:
    """`off,dflash` in that order. Raises `typer.BadParameter`, as all here do."""
    names = [name.strip() for name in text.split(",")]
    return _distinct([_mode(name, "--modes") for name in names], "--modes")


def parse_concurrency(text: str) -> list[int]:
    """`1,2,4` ascending."""
    levels = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise _bad("--concurrency", f"{part!r} is not a whole number of at least 1")
        levels.append(int(part))
    return sorted(_distinct(levels, "--concurrency"))


def parse_urls(text: str | None, modes: Sequence[Mode], *, engine: bool) -> dict[Mode, str]:
    """The server of each mode: `http://host:port` for a single mode, or `mode=http://..,..`.

    None is no server. Where nothing runs in process, every mode needs one.
    """
    if text is None:
        return {}
    urls: dict[Mode, str] = {}
    for part in text.split(","):
        name, separator, url = part.strip().partition("=")
        if not separator or "/" in name:
            if len(modes) > 1 or "," in text:
                raise _bad("--url", f"{part!r} does not say its mode; with several give off={part}")
            name, url = modes[0], part.strip()
        mode = _mode(name, "--url")
        if mode not in modes:
            raise _bad("--url", f"{part!r} is for mode {mode}, --modes is {','.join(modes)}")
        if mode in urls:
            raise _bad("--url", f"mode {mode} has two urls, at most one is possible")
        urls[mode] = _url(url)
    missing = [mode for mode in modes if mode not in urls]
    if missing and not engine:
        raise _bad("--url", f"there is none for mode {missing[0]}, and --engine is not given")
    return urls


def check_dtype(text: str) -> DType:
    """One of `DTYPES`."""
    for dtype in DTYPES:
        if text == dtype:
            return dtype
    raise _bad("--dtype", f"{text!r} is none of {', '.join(DTYPES)}")


def check_plot(path: Path | None) -> None:
    """Refuse, before hours of measuring, a picture that could not be written after it."""
    if path is None:
        return
    if path.suffix.removeprefix(".") not in PLOT_FORMATS:
        raise _bad("--plot", f"{str(path)!r} does not end in {', '.join(PLOT_FORMATS)}")
    check_folder(path, "--plot")
    if find_spec("matplotlib") is None:
        raise _bad("--plot", "it needs matplotlib, which is in the extra 'bench'")


def check_folder(path: Path | None, option: str) -> None:
    """Refuse a file in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise _bad(option, f"{str(path)!r} is in a folder that does not exist")


def check_engine_only(values: Mapping[str, object], *, engine: bool) -> None:
    """Refuse options that are for engines in this process where there is none."""
    for option, value in values.items():
        if value is not None and not engine:
            raise _bad(option, "it is for engines in this process; with --url add --engine")


def read_texts(path: Path, limit: int | None) -> list[str]:
    """The prompts of a JSONL file with `turns`, the first turns of its first `limit` rows."""
    try:
        texts = [prompt.text for prompt in load_prompts(path, limit)]
    except OSError as error:
        raise _bad("--file", f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise _bad("--file", str(error)) from None
    if not texts:
        raise _bad("--file", f"{path} has no rows, at least 1 is needed")
    return texts


def _mode(name: str, option: str) -> Mode:
    for mode in MODES:
        if name == mode:
            return mode
    raise _bad(option, f"mode {name!r} is none of {', '.join(MODES)}")


def _url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise _bad("--url", f"{url!r} is not http://host:port or https://host:port")
    return url.rstrip("/")


def _distinct(values: list[T], option: str) -> list[T]:
    for value in values:
        if values.count(value) > 1:
            raise _bad(option, f"{value} is given twice, once is the limit")
    return values


def _bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)
