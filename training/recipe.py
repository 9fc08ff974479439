"""How a drafter is built and trained. The defaults are the demo pair's."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

Optimizer = Literal["muon", "adamw"]


class TrainingRefused(ValueError):
    """Something the user can mend keeps training from going on; the message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`target_layer_ids` empty and `mask_token_id` -1 choose, see `training.creation`.

    A step covers about `step_positions` block positions, in passes of about `pass_positions` each;
    `anchors` is the most blocks that one sequence gives a step. The j-th draft weighs
    exp(-(j - 1) / gamma). The loss is over the labels, the `frequent_tokens` most frequent tokens
    and `random_tokens` random ones; `distill` of it is against the target's `top_k` most probable
    tokens. `learning_rate` is that of matrices, `norm_rate` of norms; both rise over `warm_up`
    steps and fall linearly over the last `decay` of all. Sequences end at `max_length` tokens.
    """

    block_size: int = 10
    num_layers: int = 4
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = -1
    gamma: float = 5.0
    anchors: int = 96
    step_positions: int = 16384
    pass_positions: int = 4096
    frequent_tokens: int = 1024
    random_tokens: int = 1024
    distill: float = 0.0
    top_k: int = 8
    optimizer: Optimizer = "muon"
    learning_rate: float = 0.02
    norm_rate: float = 2e-3
    weight_decay: float = 0.0
    warm_up: int = 10
    decay: float = 0.5
    max_length: int = 2048
    held_out: int = 16
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `TrainingRefused` naming the first field that is out of its range."""
        least = {
            "block_size": 2,
            "num_layers": 1,
            "anchors": 1,
            "step_positions": 1,
            "pass_positions": 1,
            "frequent_tokens": 0,
            "random_tokens": 0,
            "top_k": 1,
            "warm_up": 0,
            "max_length": 3,
            "held_out": 0,
            "mask_token_id": -1,
        }
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise TrainingRefused(
                    f"{name} is {getattr(self, name)}, at least {limit} is needed"
                )
        for name in ("gamma", "learning_rate", "norm_rate"):
            if not getattr(self, name) > 0:
                raise TrainingRefused(f"{name} is {getattr(self, name)}, it must be above 0")
        for name in ("distill", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise TrainingRefused(f"{name} is {getattr(self, name)}, it must be within 0..1")
        if self.weight_decay < 0:
            raise TrainingRefused(f"weight_decay is {self.weight_decay}, at least 0 is needed")

    @property
    def num_drafts(self) -> int:
        """K, the drafts of a block."""
        return self.block_size - 1

    def rate_at(self, step: int, num_steps: int) -> float:
        """The share of the learning rates that step `step` (0 is the first) of `num_steps` uses."""
        rising = min(1.0, (step + 1) / (self.warm_up + 1))
        falling = (num_steps - step) / max(1.0, self.decay * num_steps)
        return min(rising, falling, 1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**values | {"target_layer_ids": tuple(values["target_layer_ids"])})

    def difference(self, other: "Recipe") -> str | None:
        """The first field in which `other` is different, in words; None where there is none."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {theirs}, was {mine}"
        return None
