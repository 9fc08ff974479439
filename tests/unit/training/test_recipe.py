"""A recipe judges its numbers and survives JSON."""

import json
from typing import Any

import pytest
import typer

from training.options import changed
from training.recipe import Recipe, TrainingRefused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1, at least 2 is needed"),
        ({"gamma": 0.0}, "gamma is 0.0, it must be above 0"),
        ({"distill": 1.5}, "distill is 1.5, it must be within 0..1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, at least 0 is needed"),
    ],
)
def test_what_is_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingRefused, match=message):
        Recipe(**changes)


def test_rates_rise_stay_and_fall() -> None:
    recipe = Recipe(warm_up=4, decay=0.5)
    rates = [recipe.rate_at(step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:11] == [1.0] * 6
    assert rates[11:] == pytest.approx([1 - i / 10 for i in range(1, 10)])
    assert Recipe(warm_up=0, decay=0.0).rate_at(19, 20) == 1.0


def test_json_and_back() -> None:
    recipe = Recipe(target_layer_ids=(1, 2), optimizer="adamw")
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert recipe.difference(again) is None
    assert recipe.difference(Recipe(target_layer_ids=(1, 2))) == "optimizer is muon, was adamw"


def test_settings_change_a_recipe() -> None:
    recipe = changed(Recipe(), ["gamma=3", "target_layer_ids=1,2,5", "optimizer=adamw", "seed=4"])
    assert recipe == Recipe(gamma=3.0, target_layer_ids=(1, 2, 5), optimizer="adamw", seed=4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gamma", "'gamma' is not name=value with a name of block_size, num_layers"),
        ("gama=3", "'gama=3' is not name=value"),
        ("gamma=wide", "gamma can't be 'wide'"),
        ("optimizer=sgd", "optimizer can't be 'sgd'"),
        ("anchors=0", "anchors is 0, at least 1 is needed"),
    ],
)
def test_wrong_settings_are_one_line(setting: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        changed(Recipe(), [setting])
    assert caught.value.format_message().startswith(f"Invalid value for --set: {message}")
