"""Structured output: does every answer keep to its schema, and what does that cost a token?

`python -m benchmarks.structured`; the last line is JSON, the exit status 1 where one does not.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer
from rich.console import Console
from rich.progress import Progress

from actors.llm import LLM, RequestOutput
from actors.messages import Guide, SamplingParams
from benchmarks import options
from models.hub import DEMO_DRAFTER, DEMO_TARGET

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"

_console = Console(stderr=True)


def is_valid(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """Whether the text is JSON of this schema, and the model ended it."""
    try:
        jsonschema.validate(json.loads(output.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return output.finish_reason == "stop"


def seconds_per_token(outputs: Sequence[RequestOutput]) -> float:
    """Of a run as a whole."""
    first = min(output.timing.submitted_at for output in outputs)
    last = max(output.timing.finished_at for output in outputs)
    return (last - first) / sum(len(output.token_ids) for output in outputs)


def main(
    file: Annotated[
        Path, typer.Option(help="JSONL with a `prompt` and its `schema` in each row.")
    ] = SCHEMAS,
    requests: Annotated[int, typer.Option(min=1, help="Requests; rows begin again.")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    model: Annotated[str, typer.Option(help="Target.")] = DEMO_TARGET,
    drafter: Annotated[str, typer.Option(help="Drafter.")] = DEMO_DRAFTER,
) -> None:
    """Answer with and without a schema, as many tokens each time, with speculation on."""
    options.check_dtype(dtype)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = list(islice(cycle(rows), requests))
    with (
        LLM(
            model,
            dtype=dtype,
            max_num_seqs=concurrency,
            speculative_config={"method": "dflash", "model": drafter},
            enable_prefix_caching=False,
        ) as llm,
        Progress(console=_console, transient=True, refresh_per_second=1) as bar,
    ):
        llm.warm_up()
        task = bar.add_task("requests", total=2 * requests)

        def generate(each: Sequence[SamplingParams]) -> list[RequestOutput]:
            return llm.generate(
                prompts, each, on_finish=lambda: bar.advance(task), max_in_flight=concurrency
            )

        prompts = [llm.encode_chat([{"role": "user", "content": row["prompt"]}]) for row in rows]
        plain = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        guided = [
            replace(
                plain, seed=i, guide=Guide(kind="json_schema", source=json.dumps(row["schema"]))
            )
            for i, row in enumerate(rows)
        ]
        answers = generate(guided)
        free = generate(
            [
                replace(each, guide=None, max_tokens=len(answer.token_ids), ignore_eos=True)
                for each, answer in zip(guided, answers, strict=True)
            ]
        )
    valid = [is_valid(answer, row["schema"]) for answer, row in zip(answers, rows, strict=True)]
    times = [1000 * seconds_per_token(each) for each in (answers, free)]
    steps = sum(answer.speculation.verify_steps for answer in answers)
    emitted = sum(answer.speculation.emitted_tokens for answer in answers)
    result = {
        "requests": requests,
        "valid": sum(valid),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "acceptance_length": round(emitted / max(steps, 1), 4),
        "ms_per_token": round(times[0], 3),
        "ms_per_token_free": round(times[1], 3),
        "ratio": round(times[0] / times[1], 3),
    }
    print(json.dumps(result))
    raise typer.Exit(0 if all(valid) else 1)


if __name__ == "__main__":
    typer.run(main)
