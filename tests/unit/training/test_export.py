"""Exported drafters load, in both formats, and the card says how they came about."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.config import load_drafter_config
from tests.unit.training.conftest import RunMaker
from training.checkpoint import RunFolder
from training.export import export
from training.recipe import TrainingRefused
from training.run import train


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_runs_drafter(
    make_run: RunMaker, tmp_path: Path, format: Any, dtype: str
) -> None:
    run = make_run(kind="llama3")
    train(run)
    out = tmp_path / "out"
    export(run.folder, out, format, dtype, "org/target")
    trained, found = load_drafter_config(run.folder.drafter), load_drafter_config(out)
    assert found.format == format
    assert found.decoder == trained.decoder
    assert found.capture_layer_ids == trained.capture_layer_ids
    assert found.block_size == trained.block_size
    assert found.mask_token_id == trained.mask_token_id
    weights = load_file(out / "model.safetensors")
    for name, values in load_file(run.folder.drafter / "model.safetensors").items():
        assert torch.equal(weights[name], values.to(getattr(torch, dtype)))
    card = (out / "README.md").read_text()
    assert "# DFlash drafter for org/target" in card
    assert f"| format | {format}, {dtype}, 0.0 M parameters |" in card
    assert "4 steps" in card
    assert (out / "log.csv").is_file()


def test_nothing_is_overwritten_and_nothing_made_of_nothing(
    make_run: RunMaker, tmp_path: Path
) -> None:
    with pytest.raises(TrainingRefused, match="holds no saved run"):
        export(RunFolder(tmp_path), tmp_path / "out", "z-lab", "float32", None)
    run = make_run(num_steps=1)
    train(run)
    with pytest.raises(TrainingRefused, match="is not empty"):
        export(run.folder, run.folder.path, "z-lab", "float32", None)
