"""A tiny target, and runs that train a drafter for it."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.dflash_reference import generate
from tests.tiny import Kind, load_target, make_target
from training.checkpoint import RunFolder
from training.recipe import Recipe
from training.run import Run, choose, prepare

PROMPTS = [[3, 14, 15, 92, 65], [35, 8, 97, 93, 23, 84, 62], [64, 33, 83, 27]]
RECIPE: dict[str, Any] = {
    "block_size": 5,
    "num_layers": 2,
    "target_layer_ids": (0, 2, 3),
    "mask_token_id": 299,
    "anchors": 8,
    "step_positions": 80,
    "pass_positions": 40,
    "frequent_tokens": 20,
    "random_tokens": 40,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "dtype": "float32",
}

RunMaker = Callable[..., Run]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """A target of each kind, written once."""
    made: dict[str, Path] = {}

    def make(kind: Kind) -> Path:
        if kind not in made:
            made[kind] = make_target(tmp_path_factory.mktemp(kind) / "target", kind)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def responses(targets: Callable[[Kind], Path]) -> Callable[[Kind], list[dict[str, Any]]]:
    """Rows of samples: greedy responses of 24 tokens to PROMPTS."""
    made: dict[str, list[dict[str, Any]]] = {}

    def make(kind: Kind) -> list[dict[str, Any]]:
        if kind not in made:
            model = load_target(targets(kind))
            made[kind] = [
                {"prompt_ids": prompt, "response_ids": generate(model, None, prompt, 24).token_ids}
                for prompt in PROMPTS
            ]
        return made[kind]

    return make


@pytest.fixture
def make_run(
    tmp_path: Path,
    targets: Callable[[Kind], Path],
    responses: Callable[[Kind], list[dict[str, Any]]],
) -> RunMaker:
    """`make_run(name, kind="llama", num_steps=4, every=2, **recipe)`, prepared."""

    def make(
        name: str = "run", kind: Kind = "llama", num_steps: int = 4, every: int = 2, **changes: Any
    ) -> Run:
        data = tmp_path / f"{kind}.jsonl"
        write_rows(data, responses(kind))
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir(exist_ok=True)
        run = choose(
            Run(
                folder=folder,
                target=targets(kind),
                target_name=kind,
                recipe=Recipe(**RECIPE | changes),
                data=(data,),
                features=folder.path / "features",
                num_steps=num_steps,
                every=every,
            )
        )
        prepare(run)
        return run

    return make


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
