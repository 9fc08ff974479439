"""Ranks in threads of this process, and models loaded without the engine."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from models.backends.backend import Backend
from models.config import load_drafter_config, load_target_config
from models.dflash import DFlashDrafter
from models.drafting import DrafterRank
from models.kv_cache import LayerKV, allocate
from models.layers import LMHead
from models.ops import Grid, Ops, TorchOps
from models.parallel import TensorParallel
from models.slot_sampling import SamplingState
from models.state import SlotState
from models.steps import ModelRank, Regions
from models.target import Target, Vocabulary
from models.weights import CheckpointReader

T = TypeVar("T")
ONE = TensorParallel()
TORCH = TorchOps()


class Exchange:
    """Where the threads of one group swap tensors; `operands` are all that was ever swapped."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[Tensor | None] = [None] * size
        self.operands: list[Tensor] = []

    def swap(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, rank 0 first."""
        self.parts[rank] = x
        self.barrier.wait()
        parts = cast(list[Tensor], list(self.parts))
        if rank == 0:
            self.operands += parts
        self.barrier.wait()
        return parts


@dataclass(frozen=True)
class ThreadRank(TensorParallel):
    """A `TensorParallel` whose other ranks are threads."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange.swap(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange.swap(self.rank, x), dim)


def fake_rank(rank: int, size: int) -> TensorParallel:
    """A rank that never communicates."""
    return TensorParallel(rank, size, cast(Any, object()) if size > 1 else None)


def run_ranks(
    size: int, work: Callable[[TensorParallel], T], operands: list[Tensor] | None = None
) -> list[T]:
    """What `work(tp)` returned on every rank of a group of threads.

    Appends what the ranks communicated to `operands`. Raises what a rank raised.
    """
    exchange = Exchange(size)

    def run(rank: int) -> T:
        tp = ONE if size == 1 else ThreadRank(rank, size, cast(Any, object()), exchange)
        try:
            with torch.inference_mode():
                return work(tp)
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (future.exception() for future in futures) if e is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if operands is not None:
        operands += exchange.operands
    return [future.result() for future in futures]


def run_heads(
    logits: Tensor,
    size: int,
    work: Callable[[Tensor, LMHead], T],
    operands: list[Tensor] | None = None,
    ops: Ops = TORCH,
) -> list[T]:
    """What `work(local logits, head)` returned on every rank that has its columns of
    `logits [rows, vocabulary]`."""
    rows, vocab_size = logits.shape
    width = -(-vocab_size // size)
    padded = torch.full((rows, width * size), float("-inf"), dtype=logits.dtype)
    padded[:, :vocab_size] = logits

    def run(tp: TensorParallel) -> T:
        head = LMHead(torch.zeros(width, 1), vocab_size, tp, ops)
        return work(padded[:, tp.rank * width : (tp.rank + 1) * width], head)

    return run_ranks(size, run, operands)


def load_target_rank(
    directory: Path,
    *,
    tp: TensorParallel = ONE,
    num_positions: int = 64,
    capture: Sequence[int] = (),
    reader: CheckpointReader | None = None,
    dtype: torch.dtype = torch.float32,
    ops: Ops = TORCH,
) -> Target:
    """One rank of the target in `directory`, not packed."""
    with nullcontext(reader) if reader else CheckpointReader(directory) as reader:
        return Target(
            load_target_config(directory),
            tp,
            reader,
            dtype=dtype,
            num_positions=num_positions,
            capture_layer_ids=capture,
            ops=ops,
        )


def load_drafter_rank(
    directory: Path,
    target: Vocabulary,
    *,
    tp: TensorParallel = ONE,
    num_positions: int = 64,
    reader: CheckpointReader | None = None,
    dtype: torch.dtype = torch.float32,
) -> DFlashDrafter:
    """One rank of the drafter in `directory`, bound, not packed."""
    with nullcontext(reader) if reader else CheckpointReader(directory) as reader:
        drafter = DFlashDrafter(
            load_drafter_config(directory),
            tp,
            reader,
            target,
            dtype=dtype,
            num_positions=num_positions,
        )
    drafter.bind()
    return drafter


def load_model_rank(
    target_dir: Path,
    drafter_dir: Path | None,
    *,
    tp: TensorParallel = ONE,
    page_size: int = 4,
    num_slots: int = 3,
    max_model_len: int = 64,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
) -> ModelRank:
    """One rank; slot `s` owns the pages from `1 + s * pages per request` on.

    Plain torch, or packed and compiled by `backend`.
    """
    capture = load_drafter_config(drafter_dir).capture_layer_ids if drafter_dir else ()
    target = load_target_rank(
        target_dir,
        tp=tp,
        num_positions=max_model_len,
        capture=capture,
        dtype=dtype,
        ops=backend.ops if backend else TORCH,
    )
    drafter, num_drafts, specs = None, 0, target.kv_specs()
    num_target = len(specs)
    if drafter_dir is not None:
        drafter = load_drafter_rank(
            drafter_dir, target, tp=tp, num_positions=max_model_len, dtype=dtype
        )
        drafter.pack()
        num_drafts = drafter.config.num_drafts
        specs = specs + drafter.kv_specs()
    target.pack()
    pages = -(-max_model_len // page_size)
    kv = allocate(specs, 1 + num_slots * pages, page_size)
    state = SlotState.allocate(num_slots, num_drafts, pages)
    state.block_table[:num_slots] = 1 + torch.arange(num_slots * pages).view(num_slots, pages)
    compiled = (backend.compile,) if backend else ()
    drafting = None
    if drafter is not None:
        drafting = DrafterRank.of(drafter, kv[num_target:], state.block_table, *compiled)
    return ModelRank(
        target=target,
        regions=Regions.of(*compiled),
        target_kv=kv[:num_target],
        drafter_config=drafter.config if drafter else None,
        drafting=drafting,
        state=state,
        sampling=SamplingState.allocate(
            num_slots,
            num_positions=max_model_len,
            num_edits=4,
            num_bad_words=3,
            bad_word_length=3,
        ),
        vocab_size=load_target_config(target_dir).vocab_size,
    )


def feed(
    target: Target, kv: Sequence[LayerKV], table: Tensor, token_ids: Sequence[int], start: int = 0
) -> tuple[Tensor, Tensor]:
    """Run tokens at positions `start ..` of the request with the pages `table [pages]`."""
    page_size = kv[0].page_size
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int32)
    slots = table[positions // page_size] * page_size + positions % page_size
    row = torch.zeros(1, dtype=torch.int32)
    valid = torch.ones(1, len(token_ids), dtype=torch.bool)
    context = target.ops.causal_context(
        table.unsqueeze(0),
        [Grid(row, positions.unsqueeze(0), valid)],
        page_size,
        len(table),
        len(token_ids),
    )
    tokens = torch.tensor(token_ids, dtype=torch.int32)
    hidden, aux = target(tokens, positions, slots, context, kv)
    return hidden, aux
