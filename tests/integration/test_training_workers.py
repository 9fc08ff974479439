"""Two workers of Ray Train hold the parameters that one computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_training import PROMPT, Served, make_run
from tests.tiny import make_target
from training.checkpoint import RunFolder
from training.run import prepare, train
from training.workers import train_with_ray

pytest.importorskip("pyarrow", reason="the extra 'train' is not installed")
pytest.importorskip("pandas", reason="the extra 'train' is not installed")


def test_two_workers_train_as_one(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama")
    response = [(13 * i) % 250 for i in range(40)]
    alone = tmp_path / "alone"
    alone.mkdir()
    run = make_run(alone, Served(target, response), num_steps=3)
    row = (alone / "one.jsonl").read_text()
    shifted = row.replace(str(PROMPT), str(PROMPT[::-1]))
    (alone / "one.jsonl").write_text(row + shifted)
    # All tokens are candidates: none of them depend on the worker.
    recipe = replace(run.recipe, step_positions=600, random_tokens=300)
    run = replace(run, recipe=recipe, num_threads=1)
    prepare(run)
    together = RunFolder(tmp_path / "together")
    together.path.mkdir()
    shared = replace(run, folder=together)
    prepare(shared)
    train(run)
    train_with_ray(shared, 2)
    found = load_file(together.path / "state.safetensors")
    for name, values in load_file(alone / "state.safetensors").items():
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-4, msg=name)
    assert together.progress().step == 3
