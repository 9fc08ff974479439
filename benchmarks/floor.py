"""The floor of a step: what its matmuls alone take, at the best a CPU does here.

A step of the target reads every weight of every layer and of the LM head, whatever it computes.
With weights packed once for oneDNN, at one row, that is the least time a step can take: attention,
norms, the drafter, sampling and the scheduler come on top.
"""

import os
import statistics
import time

import torch
from torch import Tensor

from models.backends.eager import EagerBackend
from models.config import TargetConfig


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

    Holds as many bytes of weights as the target's matmuls have. Measurements accumulate, so that
    they can be spread between those that they are compared with.
    """

    def __init__(self, target: TargetConfig, dtype: torch.dtype) -> None:
        self._backend = EagerBackend(len(os.sched_getaffinity(0)))
        self._times_s: list[float] = []
        self._matmuls = self._backend.submit(lambda: _pack(target, dtype)).result()

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Whether this machine's torch can pack weights of `dtype` for oneDNN."""
        if not torch.backends.mkldnn.is_available():
            return False
        return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def measure(self, num_runs: int = 5) -> None:
        """Time `num_runs` more steps, on a thread of its own as the engine's steps are."""
        self._backend.submit(self._step).result()  # threads wake up in the first
        for _ in range(num_runs):
            start = time.perf_counter()
            self._backend.submit(self._step).result()
            self._times_s.append(time.perf_counter() - start)

    @property
    def ms(self) -> float:
        """The median of all measured steps, in milliseconds."""
        return 1000 * statistics.median(self._times_s)

    def close(self) -> None:
        """End the thread and drop the weights."""
        self._backend.close()
        self._matmuls = []

    def _step(self) -> None:
        for row, packed in self._matmuls:
            torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")


def _pack(target: TargetConfig, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """An input row `[1, inputs]` and packed weight `[outputs, inputs]` for each matmul."""
    generator = torch.Generator().manual_seed(0)
    matmuls = []
    for outputs, inputs in weight_shapes(target):
        weight = torch.empty(outputs, inputs, dtype=dtype).normal_(generator=generator)
        row = torch.empty(1, inputs, dtype=dtype).normal_(generator=generator)
        matmuls.append((row, torch.ops.mkldnn._reorder_linear_weight(weight, row.shape[0])))
    return matmuls
