"""A run's folder: everything needed to go on exactly, and the drafter as it is served."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.creation import unstacked, write_config
from training.log import measured, read_log
from training.pair import Pair
from training.progress import Progress
from training.recipe import Recipe, TrainingRefused

_STATE = "state.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`drafter/` is the checkpoint to serve, `state.safetensors` what a resumed run goes on from,
    `log.csv` and `curve.png` its course, `initial/` what it began with."""

    path: Path

    @property
    def drafter(self) -> Path:
        return self.path / "drafter"

    @property
    def initial(self) -> Path:
        return self.path / "initial"

    @property
    def log(self) -> Path:
        return self.path / "log.csv"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    def save(
        self, state: Mapping[str, Tensor], recipe: Recipe, progress: Progress, source: str
    ) -> None:
        """Replace the state, atomically. `source` is the target's name."""
        about = {
            "format": _FORMAT,
            "recipe": recipe.to_json(),
            "progress": asdict(progress),
            "target": source,
        }
        new = self.path / f"{_STATE}.new"
        tensors = {name: values.contiguous() for name, values in state.items()}
        save_file(tensors, new, metadata={"training": json.dumps(about)})
        os.replace(new, self.path / _STATE)

    def about(self) -> dict[str, Any] | None:
        """Recipe, progress and target of the saved state; None where there is none."""
        if not (self.path / _STATE).is_file():
            return None
        with safe_open(self.path / _STATE, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("training", "{}"))
        if about.get("format") != _FORMAT:
            raise TrainingRefused(
                f"{self.path / _STATE} has format {about.get('format')}, {_FORMAT} is needed"
            )
        return about

    def recipe(self) -> Recipe | None:
        about = self.about()
        return None if about is None else Recipe.from_json(about["recipe"])

    def progress(self) -> Progress:
        about = self.about()
        return Progress() if about is None else Progress(**about["progress"])

    def summary(self) -> dict[str, Any]:
        """How far the run is, and the last measured acceptance length."""
        progress = self.progress()
        lengths = [row["acceptance_length"] for row in measured(read_log(self.log))]
        return {
            "run": str(self.path),
            "steps": progress.step,
            "epochs": progress.epoch,
            "positions": progress.num_positions,
            "hours": round(progress.elapsed_s / 3600, 3),
            "acceptance_length": float(lengths[-1]) if lengths else None,
        }

    def state(self) -> dict[str, Tensor]:
        with safe_open(self.path / _STATE, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def save_drafter(
    directory: Path, pair: Pair, config: dict[str, Any], masters: Mapping[str, Tensor]
) -> None:
    """Write the drafter in z-lab format and float32; the weights are replaced atomically.

    `masters` are the values of its parameters, by the names they have in the drafter.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for i, layer in enumerate(pair.drafter.layers):
        prefix = f"layers.{i}"
        of_layer = {
            name.removeprefix(f"{prefix}."): values
            for name, values in masters.items()
            if name.startswith(f"{prefix}.")
        }
        weights |= {f"{prefix}.{n}": w for n, w in unstacked(layer, of_layer).items()}
    weights |= {f"{name}.weight": masters[name] for name in ("fc", "hidden_norm", "norm")}
    new = directory / "model.safetensors.new"
    tensors = {name: w.detach().cpu().contiguous() for name, w in weights.items()}
    save_file(tensors, new, metadata={"format": "pt"})
    os.replace(new, directory / "model.safetensors")
    write_config(directory, config)
