"""Threads that are the ranks of a target and of dedicated drafters, with real exchanges."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from models.backends import gloo
from models.config import load_target_config
from models.drafting import DrafterRank
from models.exchange import Exchange, join_exchange, open_store
from models.kv_cache import allocate
from models.parallel import TensorParallel
from models.steps import ModelRank
from models.target import Vocabulary
from models.weights import CheckpointReader
from tests.unit.models.conftest import Pair
from tests.unit.models.ranks import ONE, TORCH, load_drafter_rank, load_model_rank, run_ranks

HOST = "127.0.0.1"
PATIENCE_S = 15.0
T, D = TypeVar("T"), TypeVar("D")
Join = Callable[[], Exchange]
Wrap = Callable[[Any, int], Any]


class Meeting:
    """A store where so many ranks make an exchange."""

    def __init__(self, num_targets: int, num_drafters: int, timeout_s: float = PATIENCE_S) -> None:
        self.num_targets, self.num_drafters = num_targets, num_drafters
        self.timeout_s = timeout_s
        self.store = open_store(HOST)
        self.address = f"{HOST}:{self.store.port}"

    def join(self, rank: int, wrap: Wrap | None = None) -> Exchange:
        """On every rank, target ranks first; `wrap(group, rank)` may stand for its group."""
        num_targets, num_drafters = self.num_targets, self.num_drafters
        if wrap is None:
            return join_exchange(
                self.address, HOST, rank, num_targets, num_drafters, self.timeout_s
            )
        timeout = timedelta(seconds=self.timeout_s)
        store = TCPStore(HOST, self.store.port, is_master=False, timeout=timeout)
        group = gloo.group_apart(store, HOST, rank, num_targets + num_drafters, timeout)
        return Exchange(wrap(group, rank), self.num_targets)


def run_both(
    meeting: Meeting,
    on_target: Callable[[TensorParallel, Join], T],
    on_drafter: Callable[[TensorParallel, Join], D],
    operands: list[Tensor] | None = None,
    wrap: Wrap | None = None,
) -> tuple[list[T], list[D]]:
    """What both returned on every rank. Raises what a rank raised.

    Appends what ranks communicated inside their own groups to `operands`.
    """

    def target(tp: TensorParallel) -> T:
        return on_target(tp, lambda: meeting.join(tp.rank, wrap))

    def drafter(tp: TensorParallel) -> D:
        return on_drafter(tp, lambda: meeting.join(meeting.num_targets + tp.rank, wrap))

    with ThreadPoolExecutor(2) as pool:
        targets = pool.submit(run_ranks, meeting.num_targets, target, operands)
        drafters = pool.submit(run_ranks, meeting.num_drafters, drafter, operands)
    return targets.result(), drafters.result()


class SpyGroup:
    """A process group; `operands` get all that went through it on this rank, `before(n)` is called
    in front of its n-th collective, from 0 on."""

    def __init__(
        self,
        group: Any,
        operands: list[Tensor],
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._group, self._operands, self._before = group, operands, before
        self._number = 0

    def size(self) -> int:
        return cast(int, self._group.size())

    def rank(self) -> int:
        return cast(int, self._group.rank())

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self._group, name)

        def spied(tensors: Any, *args: Any) -> Any:
            number, self._number = self._number, self._number + 1
            self._before(number)
            self._operands += _flat(tensors)
            for arg in args:
                self._operands += _flat(arg)
            return collective(tensors, *args)

        return spied


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _flat(each)] if isinstance(value, list) else []


def load_target_only(pair: Pair, tp: TensorParallel, page_size: int) -> ModelRank:
    """A rank whose drafter is elsewhere."""
    rank = load_model_rank(*pair, tp=tp, page_size=page_size)
    return replace(rank, drafting=None)


def load_drafting(
    pair: Pair,
    tp: TensorParallel = ONE,
    *,
    page_size: int,
    num_slots: int = 3,
    max_model_len: int = 64,
    dtype: torch.dtype = torch.float32,
) -> DrafterRank:
    """A rank of a dedicated drafter with the pages of `load_model_rank`."""
    with CheckpointReader(pair[0]) as reader:
        vocabulary = Vocabulary(load_target_config(pair[0]), tp, reader, dtype=dtype, ops=TORCH)
    drafter = load_drafter_rank(
        pair[1], vocabulary, tp=tp, num_positions=max_model_len, dtype=dtype
    )
    pages = -(-max_model_len // page_size)
    kv = allocate(drafter.kv_specs(), 1 + num_slots * pages, page_size)
    table = torch.zeros(num_slots + 1, pages, dtype=torch.int32)
    table[:num_slots] = 1 + torch.arange(num_slots * pages).view(num_slots, pages)
    return DrafterRank.of(drafter, kv, table)
