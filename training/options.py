"""The command line's options: each is judged before anything is loaded."""

import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from actors.config import DType
from training.evaluation import Question
from training.recipe import Recipe, TrainingRefused
from training.samples import read_rows

DTYPES: tuple[DType, ...] = typing.get_args(DType)
PLOT_FORMATS = ("png", "svg", "pdf")


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """`recipe` with `name=value` settings. Raises `typer.BadParameter`, as all here do."""
    kinds = typing.get_type_hints(Recipe)
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in kinds:
            names = ", ".join(field.name for field in fields(Recipe))
            raise bad("--set", f"{setting!r} is not name=value with a name of {names}")
        try:
            values[name] = _parsed(kinds[name], text)
        except ValueError:
            raise bad("--set", f"{name} can't be {text!r}") from None
    try:
        return Recipe.from_json(recipe.to_json() | values)
    except TrainingRefused as error:
        raise bad("--set", str(error)) from None


def existing(paths: Sequence[Path], option: str) -> tuple[Path, ...]:
    """Refuse a file that isn't there."""
    for path in paths:
        if not path.is_file():
            raise bad(option, f"{path}: no such file")
    return tuple(paths)


def read_questions(path: Path, limit: int | None) -> list[Question]:
    """The first turns of the first `limit` rows of each category of a JSONL file."""
    questions: list[Question] = []
    counts: Counter[str] = Counter()
    existing([path], "--file")
    try:
        for number, row in read_rows(path):
            try:
                question = Question(str(row.get("category", "")), str(row["turns"][0]))
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                message = f"{path}:{number}: not a row with turns ({error!r})"
                raise TrainingRefused(message) from None
            counts[question.category] += 1
            if limit is None or counts[question.category] <= limit:
                questions.append(question)
    except TrainingRefused as error:
        raise bad("--file", str(error)) from None
    if not questions:
        raise bad("--file", f"{path} has no rows, at least 1 is needed")
    return questions


def check_dtype(text: str) -> DType:
    """One of the engine's."""
    for dtype in DTYPES:
        if text == dtype:
            return dtype
    raise bad("--dtype", f"{text!r} is none of {', '.join(DTYPES)}")


def check_plot(path: Path | None) -> None:
    """Refuse, before hours of work, a picture that could not be written after it."""
    if path is None:
        return
    if path.suffix.removeprefix(".") not in PLOT_FORMATS:
        raise bad("--plot", f"{str(path)!r} does not end in {', '.join(PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise bad("--plot", f"{str(path)!r} is in a folder that does not exist")
    if find_spec("matplotlib") is None:
        raise bad("--plot", "it needs matplotlib, which is in the extra 'bench'")


def bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)


def _parsed(kind: Any, text: str) -> Any:
    """`text` as a field of the recipe. Raises `ValueError`."""
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise ValueError(text)
        return text
    if typing.get_origin(kind) is tuple:
        return tuple(int(part) for part in text.split(",") if part)
    return kind(text)
