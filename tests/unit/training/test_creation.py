"""A new drafter is made of its target and loads wherever drafters do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.config import check_pairing, load_drafter_config, load_target_config
from tests.oracle.dflash_reference import load_drafter
from tests.tiny import Kind
from tests.unit.training.conftest import RunMaker
from training.creation import spread_layer_ids, unused_token
from training.recipe import TrainingRefused


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (30, (1, 8, 14, 20, 27)),
        (36, (1, 9, 17, 25, 33)),
        (8, (1, 2, 3, 4, 5)),
        (5, (0, 1, 2, 3)),
        (2, (0,)),
    ],
)
def test_captured_layers_are_spread(num_layers: int, expected: tuple[int, ...]) -> None:
    assert spread_layer_ids(num_layers) == expected


def test_masks_are_tokens_that_nobody_uses() -> None:
    assert unused_token(100, 128, [97, 98, 99], set()) == 100
    assert unused_token(128, 128, [0, 1, 16], {1, 2}) == 16
    assert unused_token(128, 128, [0, 1, 16], {16, 2}) == 1
    with pytest.raises(TrainingRefused, match="every special token"):
        unused_token(128, 128, [0, 1], {0, 1})


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama3", "qwen3"])
def test_it_fits_its_target(make_run: RunMaker, kind: Kind) -> None:
    run = make_run(kind=kind)
    config, target = load_drafter_config(run.folder.initial), load_target_config(run.target)
    check_pairing(target, config, 4)
    assert config.capture_layer_ids == (1, 3, 4)
    assert config.decoder.rope == target.decoder.rope
    load_drafter(run.folder.initial)


def test_layers_are_the_targets_before_the_last(make_run: RunMaker) -> None:
    run = make_run(kind="qwen3")
    drafter = load_file(run.folder.initial / "model.safetensors")
    target = load_file(run.target / "model.safetensors")
    for i in range(2):
        prefix = f"layers.{i}."
        for name in [n.removeprefix(prefix) for n in drafter if n.startswith(prefix)]:
            source = target[f"model.layers.{i + 2}.{name}"]
            assert torch.equal(drafter[prefix + name], source), name
    fc = drafter["fc.weight"]
    assert torch.equal(fc[:, -32:], torch.eye(32))
    assert not fc[:, :-32].any()


def test_head_norms_have_the_targets_scale(make_run: RunMaker) -> None:
    drafter = load_file(make_run().folder.initial / "model.safetensors")
    for i in range(2):
        for name in ("q_norm", "k_norm"):
            values = drafter[f"layers.{i}.self_attn.{name}.weight"]
            assert len(values.unique()) == 1
            assert 0.3 < float(values[0]) < 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 5}, "num_layers is 5, the target's 5 layers allow at most 4"),
        ({"target_layer_ids": (0, 4)}, r"target_layer_ids is \[0, 4\]"),
        ({"mask_token_id": 300}, "mask_token_id is 300, the target's vocabulary is 0..299"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_run: RunMaker, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingRefused, match=message):
        make_run(**changes)
