"""How far a run is, and what a step of it said."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is. `epoch` and `index` are those of the next sequence."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    num_positions: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """`loss` per unit of weight; `right[j]`, the share of labels that draft j got right among the
    candidates, whatever the drafts before it."""

    loss: float
    right: tuple[float, ...]
    num_positions: int
    seconds: float
