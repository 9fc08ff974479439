"""Fixtures of the model tests: tiny checkpoints, made once, and processes to run ranks in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import Kind, make_pair, train_pair
from tests.unit.models.processes import RankProcesses

Pair = tuple[Path, Path]
PairMaker = Callable[..., Pair]

PROMPT = [3, 14, 15, 92, 65, 35, 8, 97, 93, 23, 84]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairMaker:
    """`pair(kind, **options)` is `make_pair` in a directory of its own, written once."""
    made: dict[str, Pair] = {}

    def make(kind: Kind, **options: object) -> Pair:
        key = repr((kind, sorted(options.items())))
        if key not in made:
            made[key] = make_pair(tmp_path_factory.mktemp(kind), kind, **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PairMaker:
    """`trained(kind)` is a pair with K = 4 whose drafter is right part of the time on `PROMPT`."""
    made: dict[str, Pair] = {}

    def make(kind: Kind) -> Pair:
        if kind not in made:
            target, drafter = make_pair(tmp_path_factory.mktemp(f"trained-{kind}"), kind)
            train_pair(target, drafter, [PROMPT, PROMPT[::-1]])
            made[kind] = target, drafter
        return made[kind]

    return make


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    """Four spawned processes that stay for the session."""
    processes = RankProcesses(4)
    try:
        yield processes
    finally:
        processes.close()
