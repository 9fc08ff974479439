"""The kernels beside this file, compiled once for this machine, as an `Ops`."""

import hashlib
import logging
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import ninja
import torch
from torch import Tensor

from models.hub import cache_dir
from models.kv_cache import LayerKV
from models.ops import Context, Grid
from models.scores import SamplingRows

logger = logging.getLogger(__name__)

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-Wno-psabi"]
# Row counts at which a library may change its kernel, and the bounds worth having.
_PROBED_ROWS = (*range(3, 18), 24, 31, 32, 33, 47, 48, 63, 64, 65, 96, 128, 256)
_ANY_ROWS = 1 << 40


class _Paged(NamedTuple):
    """Attention of `[tokens]`: the slot whose pages each reads and how many keys it sees."""

    block_table: Tensor
    slots: Tensor
    lens: Tensor


class NativeOps:
    """`models.ops.Ops` for CPUs; the methods' shapes are those of `TorchOps`.

    With `exact`, a row's result is the same to the bit whatever rows stand beside it.
    """

    def __init__(self, *, exact: bool) -> None:
        """Compiles the kernels where this machine has not done so before (about 20 s).

        Raises `RuntimeError` where there is no working C++ compiler.
        """
        _load()
        self._exact = exact
        self._rows: dict[tuple[int, ...], tuple[int, int]] = {}

    def pack(self, weight: Tensor) -> Tensor:
        """A handle with the weight's shape and dtype; the weight itself is no longer needed."""
        low, high = self._row_range(weight) if self._exact else (1, _ANY_ROWS)
        return torch.ops.dflash.pack(weight, low, high)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.ops.dflash.linear(flat, weight, bias).unflatten(0, x.shape[:-1])

    def gated_mlp(self, x: Tensor, gate_up: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.ops.dflash.gated_mlp(flat, gate_up, bias, down).unflatten(0, x.shape[:-1])

    def argmax(self, values: Tensor) -> Tensor:
        return torch.ops.dflash.argmax(values)

    def constrain(self, logits: Tensor, bitmask: Tensor, masked: Tensor) -> Tensor:
        return torch.ops.dflash.constrain(logits, bitmask, masked)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return torch.ops.dflash.sample(logits, *rows)

    def causal_context(
        self,
        block_table: Tensor,
        grids: Sequence[Grid],
        page_size: int,
        context_pages: int,
        num_tokens: int,
    ) -> Context:
        # The kernel reads as many pages as a token sees keys, so nothing depends on the bucket.
        slots = [grid.slots.repeat_interleave(grid.positions.shape[1]) for grid in grids]
        lens = [torch.where(g.valid, g.positions + 1, 0).flatten() for g in grids]
        padding = lens[0].new_zeros(num_tokens - sum(len(part) for part in lens))
        return _Paged(block_table, torch.cat([*slots, padding]), torch.cat([*lens, padding]))

    def paged_attention(self, q: Tensor, kv: LayerKV, context: Context) -> Tensor:
        return torch.ops.dflash.paged_attention(q, kv.k, kv.v, *context, None, None).flatten(1)

    def block_context(
        self,
        block_table: Tensor,
        slots: Tensor,
        lens: Tensor,
        block: int,
        page_size: int,
        context_pages: int,
    ) -> Context:
        return _Paged(block_table, *(t.repeat_interleave(block) for t in (slots, lens)))

    def block_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, context: Context
    ) -> Tensor:
        out = torch.ops.dflash.paged_attention(q.flatten(0, 1), kv.k, kv.v, *context, k, v)
        return out.view(*q.shape[:2], -1)

    def _row_range(self, weight: Tensor) -> tuple[int, int]:
        """Between which row counts the library's kernel gives a row the same result: measured,
        once per shape, because it differs between machines and is promised on none."""
        key = (*weight.shape, weight.element_size())
        if key not in self._rows:
            self._rows[key] = row_range(weight)
            logger.debug("rows %s for weights %s", self._rows[key], key)
        return self._rows[key]


@torch.inference_mode()
def row_range(weight: Tensor) -> tuple[int, int]:
    """Bounds `(least, most)` of the row counts at which a row of `x @ weight.T` is always the same
    to the bit. `least` is 1 or 2: a single row may have a kernel of its own.

    Raises `RuntimeError` where not even 2 and 3 rows agree.
    """
    x, like, bias = _cancelling_sums(weight, rows=_PROBED_ROWS[-1])
    handle = torch.ops.dflash.pack(like, 1, _ANY_ROWS)

    def run(x: Tensor) -> Tensor:
        return torch.stack([torch.ops.dflash.linear(x, handle, b) for b in (None, bias)])

    pairs = torch.cat([run(pair) for pair in x.split(2)], dim=1)

    def agrees(rows: int) -> bool:
        return torch.equal(run(x[:rows]), pairs[:, :rows])

    most = 2
    for rows in _PROBED_ROWS:
        if not agrees(rows):
            break
        most = rows
    if most == 2:
        raise RuntimeError(
            f"exact: on this machine a matmul with weights {list(weight.shape)} {weight.dtype} "
            "gives other results at 3 rows than at 2; set exact: false"
        )
    return 1 if agrees(1) else 2, _ANY_ROWS if most == _PROBED_ROWS[-1] else most


def _cancelling_sums(weight: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x `[rows, in]`, weights like `weight` and a bias, such that nothing but the rounding errors
    of a sum are left of it: where the order of two sums differs, their results do. Of an ordinary
    result, bfloat16 hides such errors nearly always.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = weight.shape
    order = torch.randperm(inputs, generator=generator)

    def doubled(size: int, sign: int) -> Tensor:
        half = torch.randn(size, inputs // 2, generator=generator)
        odd = torch.zeros(size, inputs % 2)
        return torch.cat([half, sign * half, odd], dim=1)[:, order].to(weight.dtype)

    bias = 1e-6 * torch.randn(outputs, generator=generator)
    return doubled(rows, -1), doubled(outputs, 1), bias.to(weight.dtype)


@cache
def _load() -> None:
    """Build the sources if need be, load them and tell the compiler the shapes of its results."""
    from torch.utils.cpp_extension import load

    directory = cache_dir() / f"native-{_fingerprint()}"
    directory.mkdir(parents=True, exist_ok=True)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{path}"
    try:
        load(
            name="dflash_native",
            sources=[str(path) for path in _SOURCES],
            extra_cflags=_FLAGS,
            build_directory=str(directory),
            is_python_module=False,
        )
    finally:
        os.environ["PATH"] = path

    torch.library.register_fake("dflash::linear", _linear_shape)
    torch.library.register_fake("dflash::gated_mlp", _mlp_shape)
    torch.library.register_fake("dflash::paged_attention", _attention_shape)


def _linear_shape(x: Tensor, handle: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], handle.shape[0])


def _mlp_shape(x: Tensor, gate_up: Tensor, bias: Tensor | None, down: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


def _attention_shape(q: Tensor, *rest: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _fingerprint() -> str:
    """Changes with whatever the compiled kernels depend on: source, torch, processor."""
    info = Path("/proc/cpuinfo")
    cpu = platform.processor() + platform.machine()
    if info.is_file():
        cpu = next(
            (line for line in info.read_text().splitlines() if line.startswith("flags")), cpu
        )
    sources = [path.read_text() for path in (*_SOURCES, *_HEADERS)]
    parts = [*sources, torch.__version__, cpu, *_FLAGS, os.environ.get("CXX", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
