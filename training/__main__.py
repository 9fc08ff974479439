"""`python -m training {generate,train,evaluate,export}`: from a target to a served drafter.

Each ends with one line of JSON on stdout; docs/new-target.md shows them in order.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from actors.errors import ConfigError, RequestRejected
from models.config_fields import CheckpointRefused
from models.hub import DEMO_TARGET, CheckpointNotFound, resolve
from training import options
from training.checkpoint import RunFolder
from training.export import FORMATS, export
from training.prompts import TASKS, check_tasks, excluded_texts, file_jobs, own_jobs
from training.recipe import Recipe, TrainingRefused

# What a user can mend, said in one line.
_EXPECTED = (
    CheckpointNotFound,
    CheckpointRefused,
    ConfigError,
    RequestRejected,
    TrainingRefused,
    OSError,
)

_console = Console(stderr=True)
app = typer.Typer(add_completion=False, no_args_is_help=True)

TargetOption = Annotated[str, typer.Option(help="The target: its name, a folder or an id.")]
BackendOption = Annotated[
    str, typer.Option(help="The engine's: eager starts at once, cpu compiles and is faster then.")
]


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="JSONL to append to; finished rows are kept.")],
    model: TargetOption = DEMO_TARGET,
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL with `prompt` or `turns`; may be given again.")
    ] = [],  # noqa: B006
    own: Annotated[int, typer.Option(min=0, help="Prompts that the target makes up.")] = 0,
    tasks: Annotated[str, typer.Option(help="What those are about.")] = ",".join(TASKS),
    exclude: Annotated[
        list[Path], typer.Option(help="JSONL with `turns` that must not be used.")
    ] = [],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a response.")] = 256,
    max_model_len: Annotated[int, typer.Option(min=4, help="Tokens of a sample.")] = 2048,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Samples written at once.")] = 256,
    sampled: Annotated[
        float, typer.Option(min=0, max=1, help="Share of responses at temperature 0.7.")
    ] = 0.25,
    thinking: Annotated[
        bool | None, typer.Option(help="What the chat template is told; nothing by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts and of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    backend: BackendOption = "auto",
) -> None:
    """Let the target answer prompts: what a drafter is trained on."""
    from actors.llm import LLM
    from training.generation import Generator

    options.check_dtype(dtype)
    options.existing([*prompts, *exclude], "--prompts/--exclude")
    started = time.monotonic()
    with _expected("generate"):
        names = [name.strip() for name in tasks.split(",")]
        check_tasks(names)
        jobs = [job for path in prompts for job in file_jobs(path, sampled, seed)]
        jobs += own_jobs(own, names, sampled, seed)
        if not jobs:
            raise options.bad("--own", "it is 0 and there are no --prompts; nothing is to be done")
        excluded = excluded_texts(exclude)
        with (
            LLM(
                model,
                dtype=dtype,
                backend=backend,
                max_model_len=max_model_len,
                max_num_seqs=concurrency,
                max_num_batched_tokens=max(512, concurrency),
            ) as llm,
            _bar() as bar,
        ):
            task = bar.add_task("samples", total=len(jobs))
            generator = Generator(
                llm, max_tokens=max_tokens, concurrency=concurrency, thinking=thinking
            )
            generator.run(
                jobs,
                out,
                excluded=excluded,
                jobs_at_once=at_once,
                on_job=lambda: bar.advance(task),
            )
            tokens = llm.stats.output_tokens
    seconds = time.monotonic() - started
    _say({"out": str(out), "jobs": len(jobs), "tokens": tokens, "seconds": round(seconds, 1)})


@app.command()
def train(
    data: Annotated[list[Path], typer.Option(help="Samples as JSONL; may be given again.")],
    run: Annotated[Path, typer.Option(help="The run's folder; one with a state is resumed.")],
    model: TargetOption = DEMO_TARGET,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 4000,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long, to be resumed.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between measuring and saving.")] = 50,
    settings: Annotated[
        list[str], typer.Option("--set", help="name=value of the recipe; may be given again.")
    ] = [],  # noqa: B006
    features: Annotated[
        Path | None, typer.Option(help="Folder of captured states; default: in the run's.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, or GPUs, by Ray Train.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each; by default an equal share.")
    ] = None,
) -> None:
    """Train a drafter, or go on with it."""
    from training.run import Run, choose, prepare
    from training.run import train as train_here

    options.existing(data, "--data")
    with _expected("train"):
        folder = RunFolder(run)
        saved = folder.recipe()
        recipe = options.changed(saved or Recipe(), settings)
        if saved is not None and (difference := saved.difference(recipe)):
            raise TrainingRefused(f"{run} can't be resumed: {difference}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        run.mkdir(parents=True, exist_ok=True)
        this = Run(
            folder=folder,
            target=resolve(model),
            target_name=model,
            recipe=recipe,
            data=tuple(data),
            features=features or run / "features",
            num_steps=steps,
            every=every,
            minutes=minutes,
            num_threads=threads,
            device=device,
        )
        this = choose(this)
        prepare(this)
        if workers == 1:
            train_here(this)
        else:
            from training.workers import train_with_ray

            train_with_ray(this, workers)
        _say(folder.summary())


@app.command()
def evaluate(
    drafters: Annotated[list[str], typer.Argument(help="Names or folders of drafters.")],
    file: Annotated[Path, typer.Option(help="JSONL with `turns` and `category`.")],
    model: TargetOption = DEMO_TARGET,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many rows of each category; all by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per prompt.")] = 128,
    max_model_len: Annotated[int, typer.Option(min=4, help="Context length.")] = 2048,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    backend: BackendOption = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw the result: png, svg or pdf.")] = None,
) -> None:
    """Measure drafters against each other as the engine serves them."""
    from training.evaluation import evaluate as measure
    from training.evaluation import make_table, to_json

    options.check_dtype(dtype)
    options.check_plot(plot)
    rows = options.read_questions(file, prompts)
    with _expected("evaluate"), _bar() as bar:
        results = {}
        for drafter in dict.fromkeys(drafters):
            task = bar.add_task(drafter, total=len(rows))
            results[drafter] = measure(
                model,
                drafter,
                rows,
                max_tokens=max_tokens,
                concurrency=concurrency,
                engine_args={
                    "dtype": dtype,
                    "backend": backend,
                    "max_model_len": max_model_len,
                },
                on_finish=lambda task=task: bar.advance(task),  # type: ignore[misc]
            )
        _console.print(make_table(results))
        if plot is not None:
            from training.plot import save_evaluation  # only here: matplotlib is optional

            save_evaluation(results, plot)
        _say({"file": str(file), "max_tokens": max_tokens, "drafters": to_json(results)})


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Option(help="The folder of a run.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = FORMATS[0],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    name: Annotated[
        str | None, typer.Option(help="The target's name in the model card and config.")
    ] = None,
) -> None:
    """Write a run's drafter as others load it, with a model card."""
    options.check_dtype(dtype)
    if format not in FORMATS:
        raise options.bad("--format", f"{format!r} is none of {', '.join(FORMATS)}")
    with _expected("export"):
        export(RunFolder(run), out, format, dtype, name)
        _say({"out": str(out), "format": format, "dtype": dtype})


@contextmanager
def _expected(command: str) -> Iterator[None]:
    try:
        yield
    except typer.BadParameter:
        raise
    except _EXPECTED as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=_console, transient=True, refresh_per_second=1
    ) as bar:
        yield bar


def _say(result: dict[str, object]) -> None:
    print(json.dumps(result))


if __name__ == "__main__":
    app(prog_name="python -m training")
