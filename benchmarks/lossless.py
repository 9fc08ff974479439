"""Speculation must never change a token: compare it, batched, with plain decoding one by one.

`python -m benchmarks.lossless`; the last line is JSON, the exit status 1 where tokens differ.
"""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from actors.engine_args import EngineArgs
from actors.llm import LLM, RequestOutput
from actors.messages import SamplingParams
from actors.stats import EngineStats
from benchmarks.prompts import SAMPLE, Prompt, load_prompts
from models.config import load_drafter_config
from models.hub import DEMO_DRAFTER, DEMO_TARGET, resolve

# Plain top-2 margin, relative to the largest logit, below which rounding may decide. In bfloat16,
# where ties are common, none is: the engine promises that rounding does not depend on the batch.
NEAR_TIE = 1e-5
NEAR_TIES = {"float32": NEAR_TIE, "bfloat16": 0.0}

_console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first token at which one prompt's outputs differ; `margin` is relative to max|logit|."""

    prompt_id: str
    index: int
    plain: int | None
    speculative: int | None
    margin: float
    near_tie: float = NEAR_TIE

    @property
    def excused(self) -> bool:
        return self.margin < self.near_tie


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which the sequences differ, an end counting as a token."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def divergence(
    llm: LLM, prompt: Prompt, plain: RequestOutput, other: RequestOutput, near_tie: float
) -> Divergence | None:
    """Where `other` leaves `plain`, judged by the plain engine's own logits there."""
    index = first_difference(plain.token_ids, other.token_ids)
    if index is None:
        return None
    history = [*plain.prompt_token_ids, *plain.token_ids[:index]]
    logits = llm.next_token_logits(history)
    top = logits.topk(2).values
    return Divergence(
        prompt_id=prompt.id,
        index=index,
        plain=plain.token_ids[index] if index < len(plain.token_ids) else None,
        speculative=other.token_ids[index] if index < len(other.token_ids) else None,
        margin=float((top[0] - top[1]) / logits.abs().max()),
        near_tie=near_tie,
    )


def summary(divergences: Sequence[Divergence], prompts: int, stats: EngineStats) -> dict[str, Any]:
    """The benchmark's result line. Acceptance at a position is per verify step."""
    steps = max(stats.verify_steps, 1)
    positions = max(stats.accepted_at, default=-1) + 1
    return {
        "prompts": prompts,
        "mismatches": sum(not d.excused for d in divergences),
        "excused": sum(d.excused for d in divergences),
        "mean_acceptance_length": round(1 + stats.accepted_tokens / steps, 4),
        "per_position_acceptance": [
            round(stats.accepted_at[position] / steps, 4) for position in range(positions)
        ],
    }


@contextmanager
def _progress(title: str, total: int) -> Any:
    with Progress(console=_console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _generate(
    llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], title: str
) -> list[RequestOutput]:
    with _progress(title, len(prompts)) as advance:
        done: Callable[[], None] = advance
        return llm.generate(prompts, sampling, on_finish=done)


def _sampling(text: str, max_tokens: int) -> SamplingParams:
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
        unknown = fields.keys() - {field.name for field in dataclass_fields(SamplingParams)}
        if unknown:
            raise ValueError(f"unknown field {min(unknown)}")
        return msgspec.convert({"max_tokens": max_tokens, **fields}, SamplingParams)
    except ValueError as error:  # msgspec's too
        raise typer.BadParameter(str(error), param_hint="--sampling") from None


def main(
    file: Annotated[
        Path, typer.Option(help="JSONL with `turns`; the first turn is used.")
    ] = SAMPLE,
    prompts: Annotated[int | None, typer.Option(help="How many rows; all by default.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens per prompt.")] = 64,
    sampling: Annotated[
        str,
        typer.Option(
            help='Fields of SamplingParams as JSON, such as {"temperature": 1, "top_p": 0.9}; '
            "each prompt has a seed of its own. Greedy by default."
        ),
    ] = "{}",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    concurrency: Annotated[int, typer.Option(help="Requests in flight with speculation on.")] = 8,
    model: Annotated[str, typer.Option(help="Target.")] = DEMO_TARGET,
    drafter: Annotated[str, typer.Option(help="Drafter.")] = DEMO_DRAFTER,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context; the target's by default, which needs most memory.")
    ] = None,
    async_scheduling: Annotated[
        bool, typer.Option(help="Whether the speculative engine plans a step ahead.")
    ] = True,
    leave_out: Annotated[
        int | None, typer.Option(help="Seed; leaves a random row out of each speculative step.")
    ] = None,
) -> None:
    """Compare speculation on, at --concurrency, with off, one request and one step at a time."""
    rows = load_prompts(file, prompts)
    params = _sampling(sampling, max_tokens)
    each = [replace(params, seed=params.seed + i) for i in range(len(rows))]
    # Noise decides between near tokens as readily as rounding does between near logits.
    near_tie = 0.0 if params.temperature else NEAR_TIES[dtype]
    # All drafts in every step: an engine that finds them too slow would have little to verify.
    speculative = {"method": "dflash", "model": drafter, "adaptive": False}
    block_size = load_drafter_config(resolve(drafter)).block_size
    budget = max(
        EngineArgs.model_fields["max_num_batched_tokens"].default, concurrency * block_size
    )
    with (
        LLM(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=1,
            async_scheduling=False,
            enable_prefix_caching=False,
        ) as off,
        LLM(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=concurrency,
            max_num_batched_tokens=budget,
            speculative_config=speculative,
            async_scheduling=async_scheduling,
            leave_out=None if leave_out is None else random.Random(leave_out).choice,
        ) as on,
    ):
        encoded = [off.encode_chat([{"role": "user", "content": row.text}]) for row in rows]
        other = _generate(on, encoded, each, "speculation on")
        plain = _generate(off, encoded, each, "speculation off")
        found = [
            divergence(off, *triple, near_tie) for triple in zip(rows, plain, other, strict=True)
        ]
        stats = on.stats
    divergences = [d for d in found if d is not None]
    for d in divergences:
        kind = "excused near-tie" if d.excused else "MISMATCH"
        print(
            f"{kind}: prompt {d.prompt_id}, output token {d.index}: plain {d.plain}, "
            f"speculative {d.speculative}, top-2 margin {d.margin:.2e} of max|logit|"
        )
    result = summary(divergences, len(rows), stats)
    print(json.dumps(result))
    raise typer.Exit(1 if result["mismatches"] else 0)


if __name__ == "__main__":
    typer.run(main)
