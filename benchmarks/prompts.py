"""Prompt files: JSONL rows with `turns`, as Spec-Bench has them."""

import json
from dataclasses import dataclass
from pathlib import Path

SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first turn of one row."""

    id: str
    category: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` rows of `path`. Raises `ValueError` naming the line that is malformed."""
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) == limit:
                break
            try:
                row = json.loads(line)
                text = row["turns"][0]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a row with turns ({error!r})") from None
            prompts.append(Prompt(str(row.get("id", number)), str(row.get("category", "")), text))
    return prompts
