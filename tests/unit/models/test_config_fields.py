"""Typed fields: a value of the right kind comes back, any other is refused with its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.config_fields import CheckpointRefused, Fields

HERE = Path("somewhere")


def fields(**raw: Any) -> Fields:
    return Fields(raw, HERE)


@pytest.mark.parametrize(
    ("get", "value", "expected"),
    [
        (Fields.integer, 3, 3),
        (lambda f, name: f.integer(name, least=0), 0, 0),
        (lambda f, name: f.number(name, 1.0), 2, 2.0),
        (lambda f, name: f.number(name, 1.0), 1e-6, 1e-6),
        (Fields.flag, True, True),
        (Fields.flag, False, False),
        (lambda f, name: f.text(name, "b"), "a", "a"),
        (Fields.integers, [2, 0], (2, 0)),
        (Fields.integers, 2, (2,)),
        (Fields.texts, ["a", "b"], ("a", "b")),
        (Fields.get, {"any": 1}, {"any": 1}),
    ],
)
def test_values_of_the_right_kind(
    get: Callable[[Fields, str], Any], value: Any, expected: Any
) -> None:
    found = get(fields(x=value), "x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("raw", [{}, {"x": None}])
def test_null_is_absent(raw: dict[str, Any]) -> None:
    absent = fields(**raw)
    assert "x" not in absent
    assert absent.get("x") is None
    assert absent.integer("x", 7) == 7
    assert absent.number("x", 0.5) == 0.5
    assert absent.flag("x") is False
    assert absent.text("x", "b") == "b"
    assert absent.integers("x") == absent.texts("x") == ()
    assert absent.nested("x").get("y") is None
    with pytest.raises(CheckpointRefused, match="somewhere: x is missing"):
        absent.integer("x")


@pytest.mark.parametrize(
    ("get", "value"),
    [
        *((Fields.integer, value) for value in (0, -1, 2.0, "3", True, [3])),
        (lambda f, name: f.integer(name, 5), 0),
        (lambda f, name: f.integer(name, least=2), 1),
        *((lambda f, name: f.number(name, 1.0), v) for v in (0, -1.5, "1", True, float("nan"))),
        *((Fields.flag, value) for value in (0, 1, "true", [])),
        *((lambda f, name: f.text(name, "b"), value) for value in (1, ["a"], False)),
        *((Fields.integers, value) for value in ("12", [1, "2"], [True], [1.0], {})),
        *((Fields.texts, value) for value in ("a", [1], {"a": 1})),
        *((Fields.nested, value) for value in ([], "a", 1)),
    ],
)
def test_values_of_another_kind_are_refused_by_name_and_value(
    get: Callable[[Fields, str], Any], value: Any
) -> None:
    with pytest.raises(CheckpointRefused) as refused:
        get(fields(some_field=value), "some_field")
    assert "somewhere: some_field is " in str(refused.value)
    assert repr(value) in str(refused.value)


def test_one_object_over_another() -> None:
    both = fields(a=1, b=None, c=3).over(fields(a=9, b=2, d=4))
    assert [both.get(name) for name in "abcd"] == [1, 2, 3, 4]


def test_nested_objects_are_fields() -> None:
    assert fields(x={"y": 3}).nested("x").integer("y") == 3


def test_a_file_is_read_with_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"x": "ü"}), encoding="utf-8")
    found = Fields.read(tmp_path / "config.json")
    assert found.text("x", "") == "ü"
    assert str(tmp_path) in str(found.refuse("no"))


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{", b""])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointRefused, match=r"config\.json: not"):
        Fields.read(tmp_path / "config.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"config\.json is missing"):
        Fields.read(tmp_path / "config.json")
