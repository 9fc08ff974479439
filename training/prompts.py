"""Prompts to train on: from files, and made by the target itself."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.recipe import TrainingRefused
from training.samples import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """How the target is led to make up prompts of one kind.

    It goes on behind one of `openings` of a user's turn until it ends the turn, not before
    `least_tokens` and at the latest after `most_tokens`. `weight` is the task's part in the mix.
    """

    openings: tuple[str, ...]
    weight: int
    least_tokens: int = 4
    most_tokens: int = 160


TASKS: Mapping[str, Task] = {
    "chat": Task(
        weight=3,
        openings=("", "", "What is", "How do I", "Can you", "I'm planning", "Why", "Give me"),
    ),
    "writing": Task(
        weight=2,
        openings=("Write a", "Write a short story about", "Draft an email", "Compose", "Describe"),
    ),
    "code": Task(
        weight=2,
        openings=(
            "Write a Python function that",
            "Implement",
            "Write a program in C++ that",
            "Fix the bug in this code:\n\n```python\n",
            "Explain what this code does:\n\n```",
            "Write an SQL query that",
        ),
        most_tokens=320,
    ),
    "math": Task(
        weight=2,
        openings=("Solve", "If", "A train", "Calculate", "Find", "There are", "Prove that"),
    ),
    "qa": Task(
        weight=2,
        openings=("Who", "When did", "Where is", "What year", "Which", "How many", "Name the"),
    ),
    "summarization": Task(
        weight=3,
        openings=(
            "Summarize the following article.\n\n",
            "Summarize: ",
            "Write a summary of this text in two sentences.\n\n",
        ),
        least_tokens=200,
        most_tokens=900,
    ),
    "rag": Task(
        weight=3,
        openings=(
            "Answer the question with the help of these passages.\n\nPassage 1: ",
            "Context:\n\n",
            "Read the text and answer the question below it.\n\n",
        ),
        least_tokens=200,
        most_tokens=900,
    ),
    "translation": Task(
        weight=2,
        openings=(
            "Translate German to English: ",
            "Translate the following sentence into French: ",
            "Translate to Spanish: ",
            "Translate from French to English: ",
            "How do you say in Italian: ",
        ),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One sample to generate. `text` is its prompt, or None where the target has to go on behind
    `opening`, drawing with `seed`. The response is drawn at `temperature`."""

    id: str
    category: str
    text: str | None
    opening: str
    seed: int
    temperature: float


def own_jobs(count: int, tasks: Sequence[str], sampled: float, seed: int) -> list[Job]:
    """`count` prompts that the target makes up, of `tasks` by their weights; the first ones are
    the same whatever the count. `sampled` is the share of responses at temperature 0.7."""
    weights = [TASKS[task].weight for task in tasks]
    jobs = []
    for i in range(count):
        choose = random.Random(f"{seed}/{i}")
        task = choose.choices(tasks, weights)[0]
        opening = choose.choice(TASKS[task].openings)
        jobs.append(
            Job(
                id=f"own:{seed}:{i}",
                category=task,
                text=None,
                opening=opening,
                seed=choose.getrandbits(31),
                temperature=0.7 if choose.random() < sampled else 0.0,
            )
        )
    return jobs


def file_jobs(path: Path, sampled: float, seed: int) -> Iterator[Job]:
    """A job for each row of a JSONL file, plain or gzipped, with `prompt` or the first of `turns`,
    and maybe `category`. Raises `TrainingRefused` naming the line that is malformed."""
    for number, row in read_rows(path):
        try:
            text = row["prompt"] if "prompt" in row else row["turns"][0]
            category = str(row.get("category", path.name.split(".")[0]))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise TrainingRefused(f"{path}:{number}: not a row with a prompt ({error!r})") from None
        choose = random.Random(f"{seed}/{path.name}/{number}")
        yield Job(
            id=f"{path.name}:{number}",
            category=category,
            text=str(text),
            opening="",
            seed=choose.getrandbits(31),
            temperature=0.7 if choose.random() < sampled else 0.0,
        )


def check_tasks(names: Sequence[str]) -> None:
    """Raises `TrainingRefused` for a task that there is not."""
    for name in names:
        if name not in TASKS:
            raise TrainingRefused(f"task {name!r} is none of {', '.join(TASKS)}")


def excluded_texts(paths: Sequence[Path]) -> set[str]:
    """All turns of evaluation files, which must not be trained on. Raises `TrainingRefused`."""
    texts = set()
    for path in paths:
        for number, row in read_rows(path):
            try:
                texts |= {normal(turn) for turn in row["turns"]}
            except (KeyError, TypeError) as error:
                raise TrainingRefused(
                    f"{path}:{number}: not a row with turns ({error!r})"
                ) from None
    return texts


def normal(text: str) -> str:
    """What two prompts that are the same to a reader have in common."""
    return " ".join(text.lower().split())


def reason_to_skip(text: str, excluded: Collection[str]) -> str | None:
    """Why a prompt is not to be used, None where it is."""
    if normal(text) in excluded:
        return "it is in an excluded file"
    words = text.split()
    if not words:
        return "it is empty"
    # Sampled text of a small model may get stuck.
    if len(words) > 20 and len(set(words)) < len(words) / 5:
        return "it repeats itself"
    return None


def user_turn_prefix(template: Any) -> str:
    """What a chat template puts before the first user's words.

    `template(messages)` renders messages. Raises `TrainingRefused` where it changes the words.
    """
    mark = "\N{SNOWMAN}dflash\N{SNOWMAN}"
    rendered: str = template([{"role": "user", "content": mark}])
    before, found, _ = rendered.partition(mark)
    if not found:
        raise TrainingRefused("the chat template does not contain the user's words as they are")
    return before
