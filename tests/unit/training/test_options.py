"""Options are judged in one line that names option, value and limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from training import options
from training.evaluation import Question


def test_questions_are_first_turns_so_many_of_each_category(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"turns": ["a", "b"], "category": "math"}\n'
        '{"turns": ["c"]}\n'
        '{"turns": ["d"], "category": "math"}\n'
    )
    questions = [Question("math", "a"), Question("", "c"), Question("math", "d")]
    assert options.read_questions(file, None) == questions
    assert options.read_questions(file, 1) == questions[:2]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda: options.check_dtype("float16"), "--dtype: 'float16' is none of float32, bfloat16"),
        (lambda: options.check_plot(Path("a.gif")), "--plot: 'a.gif' does not end in png, svg"),
        (
            lambda: options.check_plot(Path("nowhere/a.png")),
            "--plot: 'nowhere/a.png' is in a folder that does not exist",
        ),
        (
            lambda: options.existing([Path("nowhere")], "--data"),
            "--data: nowhere: no such file",
        ),
        (lambda: options.read_questions(Path("no"), None), "--file: no: no such file"),
    ],
)
def test_what_is_wrong_is_one_line(judge: Callable[[], Any], message: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        judge()
    said = caught.value.format_message().removeprefix("Invalid value for ")
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize(("text", "message"), [("", "has no rows"), ('{"turn": 1}', ":1: not a")])
def test_a_file_without_questions_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text)
    with pytest.raises(typer.BadParameter, match=message):
        options.read_questions(file, None)
