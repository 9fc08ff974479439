"""Resumed, interrupted and shared training is the same training."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.training.conftest import RunMaker
from training.log import measured, read_log
from training.pair import load_pair, load_target
from training.recipe import Optimizer
from training.run import Run, train
from training.trainer import Reduce, Trainer


def state(run: Run) -> dict[str, Tensor]:
    return load_file(run.folder.path / "state.safetensors")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_a_resumed_run_is_the_uninterrupted_one(
    make_run: RunMaker, optimizer: Optimizer, distill: float
) -> None:
    changes: dict[str, Any] = {"optimizer": optimizer, "distill": distill, "held_out": 1}
    whole = make_run("whole", num_steps=5, **changes)
    train(whole)
    parts = make_run("parts", num_steps=5, every=1, **changes)
    for step in range(1, 6):
        # No minutes: it ends after one step.
        train(replace(parts, minutes=0.0))
        assert parts.folder.progress().step == step
    assert_equal(state(parts), state(whole))
    drafter = load_file(parts.folder.drafter / "model.safetensors")
    assert_equal(drafter, load_file(whole.folder.drafter / "model.safetensors"))
    first, second = (replace(run.folder.progress(), elapsed_s=0) for run in (parts, whole))
    assert first == second
    columns = ("step", "epoch", "positions", "loss", "right_1")
    logs = [
        [[row[column] for column in columns] for row in read_log(run.folder.log)]
        for run in (parts, whole)
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 5


def test_rows_behind_the_saved_state_are_written_again(make_run: RunMaker) -> None:
    run = make_run(num_steps=4, every=3)
    train(run)
    state_then = (run.folder.path / "state.safetensors").read_bytes()
    log = read_log(run.folder.log)
    train(replace(run, num_steps=6, every=10))
    # As if a crash had left a later log behind an earlier state.
    (run.folder.path / "state.safetensors").write_bytes(state_then)
    train(replace(run, num_steps=6, every=10))
    rows = read_log(run.folder.log)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert rows[:4] == log
    assert len(measured(rows)) == 0, "three samples are too few to hold any out"


def test_training_changes_what_is_drafted(make_run: RunMaker) -> None:
    run = make_run(num_steps=3)
    train(run)
    initial = load_file(run.folder.initial / "model.safetensors")
    drafter = load_file(run.folder.drafter / "model.safetensors")
    assert initial.keys() == drafter.keys()
    for name, values in drafter.items():
        assert not torch.equal(values, initial[name]), name


def test_passes_do_not_matter(make_run: RunMaker) -> None:
    # All tokens are candidates, so that none of them depend on the pass.
    one = make_run("one", random_tokens=300, pass_positions=1000)
    three = make_run("three", random_tokens=300, pass_positions=1)
    for run in (one, three):
        train(run)
    for name, values in state(one).items():
        torch.testing.assert_close(state(three)[name], values, rtol=1e-3, atol=1e-5, msg=name)


def test_workers_sum_to_one(make_run: RunMaker) -> None:
    run = make_run(random_tokens=300, step_positions=120)
    alone = trainer(run)
    reports = [alone.step(4) for _ in range(3)]
    exchange = Exchange(2)

    def work(rank: int) -> Trainer:
        part = trainer(run, rank, 2, exchange.reduce(rank))
        shared = [part.step(4) for _ in range(3)]
        for mine, other in zip(shared, reports, strict=True):
            assert mine.loss == pytest.approx(other.loss, rel=1e-4)
            assert mine.num_positions == other.num_positions
            assert mine.right == pytest.approx(other.right, abs=1e-6)
        return part

    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(work, range(2)))
    for name, values in alone.masters.state.items():
        torch.testing.assert_close(
            workers[0].masters.state[name], values, rtol=1e-3, atol=1e-5, msg=name
        )
        assert torch.equal(workers[0].masters.state[name], workers[1].masters.state[name])


def trainer(run: Run, rank: int = 0, num_workers: int = 1, reduce: Reduce | None = None) -> Trainer:
    target = load_target(run.target, run.capture_layer_ids, torch.float32, 64, torch.device("cpu"))
    pair = load_pair(run.folder.initial, target, 64)
    return Trainer(
        pair,
        run.recipe,
        run.samples()[0],
        run.cache(),
        rank=rank,
        num_workers=num_workers,
        reduce=reduce,
    )


class Exchange:
    """Sums tensors over threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[list[Tensor]] = [[] for _ in range(size)]

    def reduce(self, rank: int) -> Reduce:
        def run(tensors: list[Tensor]) -> None:
            self.parts[rank] = tensors
            self.barrier.wait()
            sums = [sum(each) for each in zip(*self.parts, strict=True)]
            self.barrier.wait()
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total)

        return run


def test_a_run_needs_samples(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run()
    short = replace(run, recipe=replace(run.recipe, max_length=5))
    with pytest.raises(ValueError, match="none of 3 samples has a prompt and 2 response tokens"):
        short.samples()
