"""The CPU backend: regions compiled by inductor, around kernels of our own."""

import logging
import os
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from models.backends import huge_pages
from models.backends.backend import Region
from models.backends.eager import EagerBackend
from models.backends.native import NativeOps
from models.hub import cache_dir

logger = logging.getLogger(__name__)

_INDUCTOR = {
    # Checks of every buffer of every layer cost a tenth of a step, and guard what tests cover.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    # Ranks are killed when an engine ends; a pool of compiler processes would outlive them.
    "compile_threads": 1,
}
# A region's argument, or a field of one; `self` is the engine's own.
_GIVEN = re.compile(r"(?!self\b)\w+(\.\w+)?")
# Shapes per region and process; dynamo's own bound of 8 assumes that shapes rarely differ.
_MOST_SHAPES = 256


class CpuBackend(EagerBackend):
    """As `EagerBackend`, with compiled regions and weights packed once.

    Compiled code is kept in the cache directory, so that the next start finds it.
    """

    def __init__(self, num_threads: int, *, exact: bool, strict: bool = False) -> None:
        """`exact` makes every row's result independent of its neighbours, to the bit; `strict`
        makes a compilation after `seal` an error.

        Raises `RuntimeError` where there is no working C++ compiler.
        """
        super().__init__(num_threads)
        # Before inductor is imported, which would choose a temporary directory.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
        self.ops = self.submit(lambda: _prepare(exact)).result()
        self._strict = strict
        self._sealed = False

    def compile(self, region: Region) -> Region:
        """See `Backend.compile`. One graph per set of shapes, or an error."""
        compiled = torch.compile(
            _with_own_code(region),
            fullgraph=True,
            dynamic=False,
            backend=self._compile_graph,
            options={"guard_filter_fn": _guards_to_keep},
        )
        return cast(Region, compiled)

    def weights_loaded(self) -> None:
        """See `Backend.weights_loaded`. Their memory goes to huge pages."""
        huge_pages.collapse()

    def seal(self) -> None:
        """See `Backend.seal`."""
        self._sealed = True

    def _compile_graph(
        self, graph: torch.fx.GraphModule, inputs: list[Any], **_: Any
    ) -> Callable[..., Any]:
        if self._sealed:
            self.late_compiles += 1
            shapes = [tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)][:3]
            message = f"a region is compiled after warm-up, for inputs {shapes} ..."
            if self._strict:
                raise RuntimeError(message)
            logger.warning("%s (%d so far)", message, self.late_compiles)
        from torch._inductor.compile_fx import compile_fx

        self.is_compiling = True
        try:
            return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=_INDUCTOR))
        finally:
            self.is_compiling = False


def _prepare(exact: bool) -> NativeOps:
    """On the device thread: dynamo's settings belong to the thread that sets them."""
    torch._dynamo.config.recompile_limit = _MOST_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = _MOST_SHAPES
    return NativeOps(exact=exact)


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Only what tells buckets apart: shapes of the tensors a region is given, numbers of them.

    All else that a region reads (weights, pools, constants) is fixed when its engine is loaded,
    and checking it in every step would cost a twentieth of the step.
    """
    kinds = ("TENSOR_MATCH", "EQUALS_MATCH", "CONSTANT_MATCH", "SEQUENCE_LENGTH")
    return [g.guard_type in kinds and bool(_GIVEN.fullmatch(g.name)) for g in guards]


def _with_own_code(region: Callable[..., Any]) -> Callable[..., Any]:
    """The same function or bound method with a code object of its own.

    Dynamo keeps what it compiled by code object, and engines in one process must not find each
    other's.
    """
    function = getattr(region, "__func__", region)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return types.MethodType(copy, region.__self__) if hasattr(region, "__self__") else copy
