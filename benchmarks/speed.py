"""How fast is it: tokens per second and latencies with speculation on and off, side by side.

`python -m benchmarks.speed`; the last line is JSON. docs/benchmarks.md says what is measured.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from actors.errors import ConfigError, RequestRejected
from actors.llm import LLM
from actors.trace import Trace
from benchmarks import options
from benchmarks.engine_load import EngineLoad, engine_args
from benchmarks.floor import Floor
from benchmarks.http_load import HttpLoad
from benchmarks.load import Cell, Load, LoadFailed, Mode, Sample, repeated
from benchmarks.prompts import SAMPLE
from benchmarks.report import json_line, make_rows, make_table
from models.config import load_target_config
from models.config_fields import CheckpointRefused
from models.hub import DEMO_DRAFTER, DEMO_TARGET, CheckpointNotFound, resolve

# Enough tokens for every kind of step to have run at this concurrency.
_WARM_UP_TOKENS = 8

# What a user can mend, said in one line.
_EXPECTED = (CheckpointNotFound, CheckpointRefused, ConfigError, LoadFailed, RequestRejected)

_console = Console(stderr=True)


def measure(
    loads: Sequence[Load],
    floor: Floor | None,
    texts: Sequence[str],
    *,
    concurrency: Sequence[int],
    rounds: int,
    max_tokens: int,
    on_finish: Callable[[], None],
) -> dict[Cell, list[tuple[Sample, ...]]]:
    """Samples of each load at each concurrency, one tuple a round.

    Within a round the loads take turns, so that a change of the machine's speed meets all alike;
    the floor is one of them. Raises `LoadFailed`, `RequestRejected`.
    """
    results: dict[Cell, list[tuple[Sample, ...]]] = {}
    for level in concurrency:
        prompts = repeated(texts, level)
        for load in loads:
            load.run(prompts[:level], min(max_tokens, _WARM_UP_TOKENS), level, _ignore)
        for _ in range(rounds):
            if floor is not None:
                floor.measure()
            for load in loads:
                samples = load.run(prompts, max_tokens, level, on_finish)
                results.setdefault(Cell(load.source, load.mode, level), []).append(samples)
    return results


def main(
    modes: Annotated[str, typer.Option(help="Some of off,dflash.")] = "off,dflash",
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,2,4,8,16",
    file: Annotated[
        Path, typer.Option(help="JSONL with `turns`; the first turn is used.")
    ] = SAMPLE,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many rows; all by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each mode, taking turns.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    url: Annotated[
        str | None,
        typer.Option(help="A running server, http://host:port; several as off=URL,dflash=URL."),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="In process; the default without --url.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the steps' times here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result: png, svg or pdf.")] = None,
    model: Annotated[str, typer.Option(help="Target; its shapes are the floor's.")] = DEMO_TARGET,
    drafter: Annotated[str, typer.Option(help="Drafter of engines in process.")] = DEMO_DRAFTER,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context of engines in process; the target's by default.")
    ] = None,
    exact: Annotated[bool | None, typer.Option(help="Same bits at every batch size.")] = None,
    async_scheduling: Annotated[bool | None, typer.Option(help="Run a step ahead.")] = None,
) -> None:
    """Measure modes against each other and against the floor of a step."""
    wanted = options.parse_modes(modes)
    levels = options.parse_concurrency(concurrency)
    in_process = engine or url is None
    urls = options.parse_urls(url, wanted, engine=in_process)
    weights = getattr(torch, options.check_dtype(dtype))
    engine_options = {
        "--trace": trace,
        "--max-model-len": max_model_len,
        "--exact": exact,
        "--async-scheduling": async_scheduling,
    }
    options.check_engine_only(engine_options, engine=in_process)
    options.check_plot(plot)
    options.check_folder(trace, "--trace")
    texts = options.read_texts(file, prompts)
    given = {
        "dtype": dtype,
        "max_num_seqs": max(levels),
        "max_model_len": max_model_len,
        "exact": exact,
        "async_scheduling": async_scheduling,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    total = (len(wanted) * in_process + len(urls)) * rounds
    total *= sum(len(repeated(texts, level)) for level in levels)
    try:
        target = load_target_config(resolve(model))
        with ExitStack() as stack, _progress(total) as advance:
            loads: list[Load] = [HttpLoad(mode, urls[mode]) for mode in urls]
            engines = [
                stack.enter_context(
                    _engine(mode, engine_args(mode, model, drafter, fields), _of(trace, mode))
                )
                for mode in (wanted if in_process else ())
            ]
            floor = None
            if Floor.available(weights):
                floor = stack.enter_context(closing(Floor(target, weights)))
            results = measure(
                [*engines, *loads],
                floor,
                texts,
                concurrency=levels,
                rounds=rounds,
                max_tokens=max_tokens,
                on_finish=advance,
            )
            floor_ms = None if floor is None else floor.ms
    except _EXPECTED as error:
        typer.echo(f"speed: {error}", err=True)
        raise typer.Exit(1) from None
    rows = make_rows(results, floor_ms)
    _console.print(make_table(rows, floor_ms))
    for load in engines:
        _print_idle_gaps(load)
    if plot is not None:
        from benchmarks.plot import save_plot  # only here: matplotlib is optional

        save_plot(rows, plot)
    print(json_line(rows, floor_ms))


@contextmanager
def _engine(mode: Mode, args: Mapping[str, Any], trace_file: Path | None) -> Iterator[EngineLoad]:
    """An engine with `args` for `LLM`, and its trace in `trace_file` when it ends."""
    if trace_file is None:
        with LLM(**args) as llm:
            llm.warm_up()
            yield EngineLoad(mode, llm)
        return
    trace = Trace()
    with LLM(**args, trace=trace) as llm:
        llm.warm_up()
        yield EngineLoad(mode, llm, trace)
    trace.save(trace_file)


def _of(trace: Path | None, mode: Mode) -> Path | None:
    """Each engine has a file of its own: `trace.json` becomes `trace-off.json`."""
    return trace and trace.with_stem(f"{trace.stem}-{mode}")


def _print_idle_gaps(load: EngineLoad) -> None:
    for concurrency, gaps_s in load.idle_gaps_s.items():
        if gaps_s:
            median_ms, mean_ms = (1000 * f(gaps_s) for f in (statistics.median, statistics.mean))
            _console.print(
                f"{load.mode}, concurrency {concurrency}: idle between steps p50 "
                f"{median_ms:.3f} ms, mean {mean_ms:.3f} ms"
            )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    # Redrawn rarely: it runs on the cores that are measured.
    with Progress(console=_console, transient=True, refresh_per_second=1) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def _ignore() -> None:
    return None


if __name__ == "__main__":
    typer.run(main)
