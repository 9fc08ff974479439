"""A training run: what is prepared once, and what each worker then does."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from models.config import load_target_config
from training import acceptance
from training.acceptance import Acceptance
from training.blocks import Anchored
from training.checkpoint import RunFolder, save_drafter
from training.creation import create_drafter, drafter_config, spread_layer_ids, unused_token
from training.features import FeatureCache, capture
from training.log import RunLog, read_log
from training.pair import load_pair, load_target
from training.progress import StepReport
from training.recipe import Recipe, TrainingRefused
from training.samples import Sample, read_samples
from training.schedule import split_samples
from training.trainer import Reduce, Trainer

_console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a worker needs to know; every choice of `recipe` is made.

    The run ends after `num_steps`, or earlier `minutes` after it was begun or resumed. Every
    `every` steps it measures acceptance and saves. `num_threads` None leaves it to torch.
    """

    folder: RunFolder
    target: Path
    target_name: str
    recipe: Recipe
    data: tuple[Path, ...]
    features: Path
    num_steps: int
    every: int
    minutes: float | None = None
    num_threads: int | None = None
    device: str = "cpu"

    def samples(self) -> tuple[list[Sample], list[Sample]]:
        """What to train on and what to measure on. Raises `TrainingRefused` for too little."""
        found = [sample.cut(self.recipe.max_length) for sample in read_samples(self.data)]
        kept = [sample for sample in found if sample is not None]
        training, held_out = split_samples(kept, self.recipe.held_out, self.recipe.seed)
        if not training:
            raise TrainingRefused(
                f"{', '.join(map(str, self.data))}: none of {len(found)} samples has a prompt and "
                f"2 response tokens within max_length {self.recipe.max_length}"
            )
        return training, held_out

    @property
    def top_k(self) -> int:
        """The target's favourites that are kept of each position."""
        return self.recipe.top_k if self.recipe.distill else 0

    @property
    def capture_layer_ids(self) -> tuple[int, ...]:
        return tuple(i + 1 for i in self.recipe.target_layer_ids)

    def cache(self) -> FeatureCache:
        config = load_target_config(self.target)
        width = len(self.capture_layer_ids) * config.decoder.hidden_size
        signature = {"target": str(self.target), "captured": list(self.capture_layer_ids)}
        dtype = getattr(torch, self.recipe.dtype)
        return FeatureCache(self.features, signature, width, dtype, self.top_k)


def choose(run: Run) -> Run:
    """The run with the layers to capture and the mask token chosen, where they are not yet."""
    config, recipe = load_target_config(run.target), run.recipe
    layer_ids = recipe.target_layer_ids or spread_layer_ids(config.decoder.num_layers)
    mask = recipe.mask_token_id
    if mask < 0:
        tokenizer = AutoTokenizer.from_pretrained(
            run.target, local_files_only=True, trust_remote_code=False
        )
        training, held_out = run.samples()
        seen = {token for sample in [*training, *held_out] for token in sample.token_ids}
        added = list(tokenizer.added_tokens_decoder)
        mask = unused_token(len(tokenizer), config.vocab_size, added, seen)
    if mask >= config.vocab_size:
        raise TrainingRefused(
            f"mask_token_id is {mask}, the target's vocabulary is 0..{config.vocab_size - 1}"
        )
    return replace(run, recipe=replace(recipe, target_layer_ids=layer_ids, mask_token_id=mask))


def prepare(run: Run) -> None:
    """Fill the feature cache and, in a new run, write the drafter to begin with."""
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    training, held_out = run.samples()
    cache = run.cache()
    sequences = [sample.token_ids for sample in [*held_out, *training]]
    missing = sum(tokens not in cache for tokens in set(sequences))
    initial = run.folder.initial / "config.json"
    if not missing and initial.is_file():
        return
    dtype, device = getattr(torch, run.recipe.dtype), torch.device(run.device)
    longest = max(map(len, sequences))
    target = load_target(run.target, run.capture_layer_ids, dtype, longest, device)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_console,
        transient=True,
        refresh_per_second=1,
    ) as bar:
        task = bar.add_task("target states", total=missing)
        cache.fill(
            sequences, lambda tokens: capture(target, tokens, run.top_k), lambda: bar.advance(task)
        )
    if not initial.is_file():
        create_drafter(run.folder.initial, run.target, target, run.recipe, sequences[:64])


def train(
    run: Run,
    *,
    rank: int = 0,
    num_workers: int = 1,
    reduce: Reduce | None = None,
    any_of: Callable[[bool], bool] = bool,
) -> Acceptance | None:
    """One worker's training, on from the folder's state where there is one.

    `any_of` says whether something is so on any worker. Returns the last measured acceptance, on
    worker 0. An interrupt, or the end of `minutes`, ends it after a whole step, saved.
    """
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    recipe, folder, first = run.recipe, run.folder, rank == 0
    training, held_out = run.samples()
    longest = max(len(s.token_ids) for s in [*training, *held_out])
    dtype, device = getattr(torch, recipe.dtype), torch.device(run.device)
    target = load_target(run.target, run.capture_layer_ids, dtype, longest, device)
    pair = load_pair(folder.initial, target, longest)
    cache = run.cache()
    trainer = Trainer(
        pair, recipe, training, cache, rank=rank, num_workers=num_workers, reduce=reduce
    )
    if folder.about() is not None:
        trainer.progress = folder.progress()
        trainer.masters.restore(folder.state(), trainer.progress.step)
    log = RunLog(folder.log, recipe.num_drafts)
    if first:
        log.begin(trainer.progress.step)
    config = drafter_config(run.target, load_target_config(run.target), recipe)
    held = [
        (len(s.prompt_ids), Anchored(s.token_ids, (), cache.get(s.token_ids).aux)) for s in held_out
    ]
    ends_at = None if run.minutes is None else time.monotonic() + 60 * run.minutes
    last: Acceptance | None = None
    with _interruptible() as interrupted, _bar(run.num_steps, first) as show:
        while trainer.progress.step < run.num_steps:
            report = trainer.step(run.num_steps)
            ended = any_of(interrupted() or (ends_at is not None and time.monotonic() > ends_at))
            step = trainer.progress.step
            due = ended or step % run.every == 0 or step == run.num_steps
            if first:
                if due and held:
                    last = acceptance.measure(pair, held)
                log.append(trainer.progress, report, last if due else None)
                show(step, report, last)
                if due:
                    masters = trainer.masters.state
                    folder.save(masters, recipe, trainer.progress, run.target_name)
                    values = {
                        name.removeprefix("master."): v
                        for name, v in masters.items()
                        if name.startswith("master.")
                    }
                    save_drafter(folder.drafter, pair, config, values)
                    _draw(folder)
            if ended:
                break
    return last


def _draw(folder: RunFolder) -> None:
    try:
        from training.plot import save_curve  # only here: matplotlib is optional
    except ImportError:
        return
    save_curve(read_log(folder.log), folder.curve)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came; a second one ends the process as usual."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, signal.default_int_handler)

    kept = {}
    # In a worker of Ray another thread runs this, and signals are not its business.
    with contextlib.suppress(ValueError):
        kept = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bar(
    num_steps: int, shown: bool
) -> Iterator[Callable[[int, StepReport, Acceptance | None], None]]:
    """A progress bar with loss, right drafts and the last acceptance."""
    with Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=_console,
        transient=True,
        refresh_per_second=1,
        disable=not shown,
    ) as bar:
        task = bar.add_task("", total=num_steps)

        def show(step: int, report: StepReport, last: Acceptance | None) -> None:
            right = " ".join(f"{share:.2f}" for share in report.right[:4])
            accepted = "-" if last is None else f"{last.length:.2f}"
            rate = report.num_positions / report.seconds
            bar.update(
                task,
                completed=step,
                description=f"loss {report.loss:.3f}, right {right} .., accepts {accepted}, "
                f"{rate:.0f} positions/s",
            )

        yield show
