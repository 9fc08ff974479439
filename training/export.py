"""A trained drafter as others load it: z-lab or speculators format, with a model card."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from training.checkpoint import RunFolder
from training.creation import write_config
from training.log import measured, read_log
from training.progress import Progress
from training.recipe import Recipe, TrainingRefused

Format = Literal["z-lab", "speculators"]
FORMATS: tuple[Format, ...] = ("z-lab", "speculators")

# Rows of the course in the card.
_COURSE_ROWS = 6
_OF_THE_DRAFTER = ("architectures", "block_size", "dflash_config", "num_target_layers")


def export(folder: RunFolder, out: Path, format: Format, dtype: str, name: str | None) -> None:
    """Write config.json, model.safetensors, README.md, and the run's log and curve, into `out`.

    `name` is the target's for others, by default the one that the run was given. Raises
    `TrainingRefused` where the run has saved nothing yet or `out` is not empty.
    """
    about, source = folder.about(), folder.drafter / "model.safetensors"
    if about is None or not source.is_file():
        raise TrainingRefused(f"{folder.path} holds no saved run")
    if out.is_dir() and any(out.iterdir()):
        raise TrainingRefused(f"{out} is not empty; give a new folder")
    target: str = name or about["target"]
    recipe, progress = Recipe.from_json(about["recipe"]), Progress(**about["progress"])
    config: dict[str, Any] = json.loads((folder.drafter / "config.json").read_text("utf-8"))
    config["dtype"] = dtype
    weights = load_file(source)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: w.to(getattr(torch, dtype)).contiguous() for name, w in weights.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_config(out, config if format == "z-lab" else speculators_config(config, target))
    rows = read_log(folder.log)
    num_parameters = sum(w.numel() for w in tensors.values())
    card = model_card(target, config, format, recipe, progress, rows, num_parameters)
    (out / "README.md").write_text(card, encoding="utf-8")
    for extra in (folder.log, folder.curve):
        if extra.is_file():
            shutil.copy(extra, out / extra.name)


def speculators_config(config: dict[str, Any], target: str) -> dict[str, Any]:
    """The config.json of the same drafter in speculators format.

    Its layer ids are of layers whose input is captured: z-lab's plus one.
    """
    dflash = config["dflash_config"]
    layers = {name: value for name, value in config.items() if name not in _OF_THE_DRAFTER}
    num_drafts = config["block_size"] - 1
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "block_size": config["block_size"],
        "mask_token_id": dflash["mask_token_id"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "dtype": config["dtype"],
    }


def model_card(
    target: str,
    config: dict[str, Any],
    format: Format,
    recipe: Recipe,
    progress: Progress,
    rows: Sequence[dict[str, str]],
    num_parameters: int,
) -> str:
    """README.md: what it is, how it was trained, and how it came along."""
    course = _thinned(measured(rows))
    lines = [
        "---",
        f"base_model: {target}",
        "tags: [speculative-decoding, dflash]",
        "---",
        f"# DFlash drafter for {target}",
        "",
        "| | |",
        "|---|---|",
        f"| format | {format}, {config['dtype']}, {num_parameters / 1e6:.1f} M parameters |",
        f"| block size | {recipe.block_size}, so K = {recipe.num_drafts} drafts per step |",
        f"| draft layers | {recipe.num_layers} of width {config['hidden_size']} |",
        f"| captured target layers | outputs of layers "
        f"{', '.join(map(str, recipe.target_layer_ids))} |",
        f"| mask token | {recipe.mask_token_id} |",
        "| embedding, LM head | the target's, not in the file |",
        "",
        f"**Training.** {progress.step} steps, {progress.num_positions / 1e6:.1f} million block "
        f"positions, {progress.epoch} whole passes over the data and a part of the next, "
        f"{progress.elapsed_s / 3600:.1f} hours. Layers initialised from the target's, "
        f"{recipe.optimizer} ({recipe.learning_rate:g}; norms {recipe.norm_rate:g}), up to "
        f"{recipe.anchors} random anchors per sequence, weights exp(-(j-1)/{recipe.gamma:g}), "
        f"{'no ' if not recipe.distill else ''}distillation"
        f"{f' ({recipe.distill:g})' if recipe.distill else ''}.",
        "",
        "| hours | positions | loss | acceptance length, held-out responses |",
        "|---|---|---|---|",
        *(
            f"| {float(row['hours']):.2f} | {int(row['positions']):,} | {row['loss']} | "
            f"{float(row['acceptance_length']):.2f} |"
            for row in course
        ),
        "",
        "Acceptance length counts tokens per verify step, the bonus included. Outputs are the "
        "target's, token for token, whatever the drafter proposes.",
    ]
    return "\n".join(lines) + "\n"


def _thinned(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few rows, the first and the last among them."""
    if len(rows) <= _COURSE_ROWS:
        return rows
    last = len(rows) - 1
    return [rows[round(i * last / (_COURSE_ROWS - 1))] for i in range(_COURSE_ROWS)]
