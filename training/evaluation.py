"""Acceptance of drafters as the engine serves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from actors.engine_args import EngineArgs
from actors.llm import LLM
from actors.messages import SamplingParams
from models.config import load_drafter_config
from models.hub import resolve

ALL = "all"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to evaluate with."""

    category: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One category, or all of them: `emitted_tokens` came from verify steps, of which
    `accepted[j]` accepted draft j (0 is the first)."""

    category: str
    num_prompts: int
    verify_steps: int
    emitted_tokens: int
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, bonus included."""
        return self.emitted_tokens / max(1, self.verify_steps)

    @property
    def shares(self) -> list[float]:
        """The share of steps that accepted each draft."""
        return [count / max(1, self.verify_steps) for count in self.accepted]


def evaluate(
    model: str,
    drafter: str,
    questions: Sequence[Question],
    *,
    max_tokens: int,
    concurrency: int,
    engine_args: Mapping[str, Any],
    on_finish: Callable[[], None],
) -> list[Row]:
    """Answer all questions, greedy, every step verifying all drafts; a row for each category, in
    the order of the questions, then one for all.

    Raises `ConfigError` and `RequestRejected`.
    """
    block_size = load_drafter_config(resolve(drafter)).block_size
    default: int = EngineArgs.model_fields["max_num_batched_tokens"].default
    speculative = {"method": "dflash", "model": drafter, "adaptive": False}
    rows: list[Row] = []
    with LLM(
        model,
        speculative_config=speculative,
        max_num_seqs=concurrency,
        max_num_batched_tokens=max(default, concurrency * block_size),
        enable_prefix_caching=False,
        **engine_args,
    ) as llm:
        for category in dict.fromkeys(question.category for question in questions):
            texts = [each.text for each in questions if each.category == category]
            encoded = [llm.encode_chat([{"role": "user", "content": text}]) for text in texts]
            before = llm.stats.accepted_at.copy()
            outputs = llm.generate(
                encoded,
                SamplingParams(max_tokens=max_tokens),
                on_finish=on_finish,
                max_in_flight=concurrency,
            )
            at = llm.stats.accepted_at
            accepted = [at[j] - before[j] for j in range(block_size - 1)]
            steps = sum(output.speculation.verify_steps for output in outputs)
            emitted = sum(output.speculation.emitted_tokens for output in outputs)
            rows.append(Row(category, len(texts), steps, emitted, tuple(accepted)))
    summed = zip(*(row.accepted for row in rows), strict=True)
    return [
        *rows,
        Row(
            ALL,
            sum(row.num_prompts for row in rows),
            sum(row.verify_steps for row in rows),
            sum(row.emitted_tokens for row in rows),
            tuple(sum(each) for each in summed),
        ),
    ]


def make_table(results: Mapping[str, Sequence[Row]]) -> Table:
    """Acceptance lengths, a column for each drafter."""
    table = Table(title="Acceptance length", box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("category", "prompts", *results):
        table.add_column(title, justify="left" if title == "category" else "right")
    for rows in zip(*results.values(), strict=True):
        lengths = [f"{row.acceptance_length:.2f}" for row in rows]
        table.add_row(rows[0].category, str(rows[0].num_prompts), *lengths)
    return table


def to_json(results: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The result, numbers with four decimals."""
    return {
        name: [
            {
                "category": row.category,
                "prompts": row.num_prompts,
                "verify_steps": row.verify_steps,
                "acceptance_length": round(row.acceptance_length, 4),
                "accepted": [round(share, 4) for share in row.shares],
            }
            for row in rows
        ]
        for name, rows in results.items()
    }
