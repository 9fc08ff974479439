"""Samples: prompts and the target's responses to them, as JSONL."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from training.recipe import TrainingRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response of the target; greedy where `temperature` is 0."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    def cut(self, max_length: int) -> "Sample | None":
        """The sample within `max_length` tokens; None where that leaves nothing to draft."""
        room = max_length - len(self.prompt_ids)
        response = self.response_ids[: max(0, room)]
        # The first response token is an anchor, the second its label.
        if len(response) < 2 or not self.prompt_ids:
            return None
        return Sample(
            id=self.id,
            category=self.category,
            prompt_ids=self.prompt_ids,
            response_ids=response,
            temperature=self.temperature,
        )


def read_samples(paths: Sequence[Path]) -> list[Sample]:
    """All samples of JSONL files, plain or gzipped.

    Rows have `prompt_ids` and `response_ids`, maybe `id`, `category` and `temperature`; rows that
    say why they were `skipped` are. Raises `TrainingRefused` naming the line that is malformed.
    """
    samples = []
    for path in paths:
        for number, row in read_rows(path):
            if isinstance(row, dict) and "skipped" in row:
                continue
            try:
                samples.append(
                    Sample(
                        id=str(row.get("id", f"{path.name}:{number}")),
                        category=str(row.get("category", "")),
                        prompt_ids=_ids(row["prompt_ids"]),
                        response_ids=_ids(row["response_ids"]),
                        temperature=float(row.get("temperature", 0.0)),
                    )
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise TrainingRefused(f"{path}:{number}: not a sample ({error!r})") from None
    return samples


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of each line. Raises `TrainingRefused` for one that is not JSON."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise TrainingRefused(f"{path}:{number}: not JSON ({error})") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
