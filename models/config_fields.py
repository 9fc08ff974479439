"""Typed reading of a config.json: whatever is wrong with a field is said with its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CheckpointRefused(ValueError):
    """A checkpoint, or a pairing of two, that this engine can't run exactly as trained."""


class Fields:
    """The fields of one JSON object; every getter raises `CheckpointRefused` naming the field.

    A field that is null counts as absent, as transformers writes it.
    """

    def __init__(self, raw: Mapping[str, Any], where: Path) -> None:
        self._raw = raw
        self.where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """The JSON object in `path`."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointRefused(f"{path.parent}: {path.name} is missing") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointRefused(f"{path}: not valid JSON ({error})") from None
        if not isinstance(raw, dict):
            raise CheckpointRefused(f"{path}: not a JSON object")
        return cls(raw, path.parent)

    def __contains__(self, name: str) -> bool:
        return self._raw.get(name) is not None

    @property
    def names(self) -> frozenset[str]:
        """The fields that are present."""
        return frozenset(name for name, value in self._raw.items() if value is not None)

    def refuse(self, message: str) -> CheckpointRefused:
        """The error to raise for something wrong with these fields."""
        return CheckpointRefused(f"{self.where}: {message}")

    def over(self, base: "Fields") -> "Fields":
        """These fields, and those of `base` that are absent here."""
        present = {name: value for name, value in self._raw.items() if value is not None}
        return Fields({**base._raw, **present}, self.where)

    def get(self, name: str) -> Any:
        """The value as it stands, None where absent."""
        return self._raw.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; absent without a `default`, it is refused."""
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.refuse(f"{name} is missing, and it can't be guessed")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(f"{name} is {value!r}, not a whole number of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(f"{name} is {value!r}, not a positive number")
        return value * 1.0

    def flag(self, name: str) -> bool:
        """True or false, false where absent."""
        value = self._raw.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(f"{name} is {value!r}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(f"{name} is {value!r}, not a text")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, or a single one; empty where absent."""
        value = self._raw.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.refuse(f"{name} is {value!r}, not a list of whole numbers")
        return tuple(items)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where absent."""
        value = self._raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(f"{name} is {value!r}, not a list of texts")
        return tuple(value)

    def nested(self, name: str) -> "Fields":
        """A nested object; empty where absent."""
        value = self._raw.get(name)
        if value is None:
            return Fields({}, self.where)
        if not isinstance(value, dict):
            raise self.refuse(f"{name} is {value!r}, not an object")
        return Fields(value, self.where)
