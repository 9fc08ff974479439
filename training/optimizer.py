"""Muon for matrices, AdamW for all else, over float32 masters of the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.recipe import Optimizer

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-8
# Newton-Schulz in five steps, coefficients of https://kellerjordan.github.io/posts/muon/.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


@dataclass(frozen=True, slots=True)
class Trained:
    """One parameter as it is computed with, and the rows of the matrices stacked in it."""

    parameter: Tensor
    rows: tuple[int, ...]


class Masters:
    """Float32 copies of the trained parameters, and their moments; `state` is all of it."""

    def __init__(
        self,
        trained: Mapping[str, Trained],
        *,
        optimizer: Optimizer,
        learning_rate: float,
        norm_rate: float,
        weight_decay: float,
    ) -> None:
        self._trained = dict(trained)
        self._muon = optimizer == "muon"
        self._rates = (learning_rate, norm_rate)
        self._weight_decay = weight_decay
        self.num_updates = 0
        self.state: dict[str, Tensor] = {}
        for name, each in trained.items():
            values = each.parameter.detach().float().clone()
            self.state[f"master.{name}"] = values
            self.state[f"first.{name}"] = torch.zeros_like(values)
            if not self._is_muons(values):
                self.state[f"second.{name}"] = torch.zeros_like(values)
        self.gradients = {name: torch.zeros_like(self.state[f"master.{name}"]) for name in trained}

    def collect(self) -> None:
        """Add the parameters' gradients to `gradients`, in float32, and forget them."""
        for name, each in self._trained.items():
            if each.parameter.grad is not None:
                self.gradients[name] += each.parameter.grad
                each.parameter.grad = None

    @torch.no_grad()
    def update(self, share: float) -> None:
        """One update by `gradients`, which are then 0; `share` of the learning rates."""
        self.num_updates += 1
        for name, each in self._trained.items():
            master, gradient = self.state[f"master.{name}"], self.gradients[name]
            rate = share * self._rates[0 if master.ndim == 2 else 1]
            if master.ndim == 2:
                master *= 1 - rate * self._weight_decay
            if self._is_muons(master):
                first = self.state[f"first.{name}"]
                for rows in _stacked(each.rows):
                    master[rows] -= rate * muon_direction(gradient[rows], first[rows])
            else:
                master -= rate * self._adam_direction(name, gradient)
            gradient.zero_()
        self.install()

    @torch.no_grad()
    def install(self) -> None:
        """The parameters are what the masters are."""
        for name, each in self._trained.items():
            each.parameter.copy_(self.state[f"master.{name}"])

    def restore(self, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Go on from a `state` and its number of updates."""
        for name, values in self.state.items():
            values.copy_(state[name])
        self.num_updates = num_updates
        self.install()

    def _is_muons(self, master: Tensor) -> bool:
        return self._muon and master.ndim == 2

    def _adam_direction(self, name: str, gradient: Tensor) -> Tensor:
        first, second = self.state[f"first.{name}"], self.state[f"second.{name}"]
        first.lerp_(gradient, 1 - _BETAS[0])
        second.lerp_(gradient.square(), 1 - _BETAS[1])
        unbiased = first / (1 - _BETAS[0] ** self.num_updates)
        scale = (second / (1 - _BETAS[1] ** self.num_updates)).sqrt() + _EPS
        return unbiased / scale


def muon_direction(gradient: Tensor, momentum: Tensor) -> Tensor:
    """The orthogonalised Nesterov direction of a matrix; updates its `momentum`.

    Scaled so that wide and tall matrices change their outputs alike.
    """
    momentum.lerp_(gradient, 1 - _MOMENTUM)
    direction = gradient.lerp(momentum, _MOMENTUM)
    scale = max(1.0, gradient.shape[0] / gradient.shape[1]) ** 0.5
    return scale * orthogonalised(direction)


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition of `matrix`, in its dtype.

    Computed in bfloat16 where the processor has products in it: singular values end anywhere
    within about 0.7 to 1.2 anyway.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x = wide.bfloat16()
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.t()
        square = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, square, x, beta=a)
    x = x.to(matrix.dtype)
    return x if wide is matrix else x.t()


def _stacked(rows: Sequence[int]) -> list[slice]:
    slices, first = [], 0
    for count in rows:
        slices.append(slice(first, first + count))
        first += count
    return slices
