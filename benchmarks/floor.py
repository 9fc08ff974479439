"""The floor of a step: what its matmuls alone take, at the best a CPU does here.

A step of the target reads every weight of every layer and of the LM head, whatever it computes.
With weights packed once for oneDNN, at one row, that is the least time a step can take: attention,
norms, the drafter, sampling and the scheduler come on top.
"""

import multiprocessing
import os
import statistics
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from models.config import TargetConfig

_Matmuls = list[tuple[Tensor, Tensor]]


def weight_shapes(target: TargetConfig) -> list[tuple[int, int]]:
    """`(outputs, inputs)` of every matmul of one step, in order, on a single rank.

    Each layer has fused q, k and v; o; fused gate and up; down. The LM head is the last.
    """
    decoder = target.decoder
    hidden, width = decoder.hidden_size, decoder.intermediate_size
    query = decoder.num_heads * decoder.head_dim
    kv = decoder.num_kv_heads * decoder.head_dim
    layer = [(query + 2 * kv, hidden), (hidden, query), (2 * width, hidden), (hidden, width)]
    return layer * decoder.num_layers + [(target.vocab_size, hidden)]


class Floor:
    """The matmuls of one target step at one row, with random weights of the target's shapes.

    They run in a process of their own: thread pools in one process slow each other down, as libgomp
    hardly spins where it has more threads than cores. The process holds as many bytes as the
    target's matmuls have. Measurements accumulate, so that they can be spread between those that
    they are compared with.
    """

    def __init__(self, target: TargetConfig, dtype: torch.dtype) -> None:
        """Returns when the weights are packed."""
        context = multiprocessing.get_context("spawn")
        self._times_s: list[float] = []
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, target, dtype), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Whether this machine's torch can pack weights of `dtype` for oneDNN."""
        if not torch.backends.mkldnn.is_available():
            return False
        return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def measure(self, num_runs: int = 5) -> None:
        """Time `num_runs` more steps."""
        self._pipe.send(num_runs)
        self._times_s += self._pipe.recv()

    @property
    def ms(self) -> float:
        """The median of all measured steps, in milliseconds."""
        return 1000 * statistics.median(self._times_s)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, target: TargetConfig, dtype: torch.dtype) -> None:
    """Answer numbers of runs with their times in seconds, after a first word when ready."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as an engine's
    with suppress(EOFError, KeyboardInterrupt), torch.inference_mode():
        matmuls = _pack(target, dtype)
        pipe.send("ready")
        while True:
            num_runs = pipe.recv()
            _step_s(matmuls)  # threads wake up in the first
            pipe.send([_step_s(matmuls) for _ in range(num_runs)])


def _step_s(matmuls: _Matmuls) -> float:
    """How long one step's matmuls take, in seconds."""
    start = time.perf_counter()
    for row, packed in matmuls:
        torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")
    return time.perf_counter() - start


def _pack(target: TargetConfig, dtype: torch.dtype) -> _Matmuls:
    """An input row `[1, inputs]` and packed weight `[outputs, inputs]` for each matmul."""
    generator = torch.Generator().manual_seed(0)
    matmuls = []
    for outputs, inputs in weight_shapes(target):
        weight = torch.empty(outputs, inputs, dtype=dtype).normal_(generator=generator)
        row = torch.empty(1, inputs, dtype=dtype).normal_(generator=generator)
        matmuls.append((row, torch.ops.mkldnn._reorder_linear_weight(weight, row.shape[0])))
    return matmuls
