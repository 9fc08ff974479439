"""Target and drafter as training computes with them: the served classes, with gradients."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.config import DrafterConfig, load_drafter_config, load_target_config
from models.dflash import DFlashDrafter
from models.parallel import TensorParallel
from models.registry import DRAFTERS, TARGETS
from models.target import Target
from models.weights import CheckpointReader
from training.attention import TrainingOps
from training.blocks import Batch
from training.features import empty_kv
from training.optimizer import Trained

_BORROWED = ("embed.", "lm_head.")


@dataclass(frozen=True, slots=True)
class Pair:
    """Both on one device and in one dtype."""

    target: Target
    drafter: DFlashDrafter
    config: DrafterConfig

    def trained(self) -> dict[str, Trained]:
        """The drafter's own parameters by name; of those that stack several matrices, the rows
        of each."""
        names = {}
        for name, parameter in self.drafter.named_parameters():
            if name.startswith(_BORROWED):
                continue
            parameter.requires_grad_(True)
            rows: tuple[int, ...] = (parameter.shape[0],)
            if name.endswith("qkv_weight"):
                rows = tuple(self.drafter.layers[0].attention.split)
            elif name.endswith("gate_up_weight"):
                rows = (parameter.shape[0] // 2,) * 2
            names[name] = Trained(parameter, rows)
        return names

    def block_states(self, batch: Batch) -> Tensor:
        """States `[rows, block, hidden]` of a batch's blocks, normed for the head.

        These are serving's `inject` and `block_hidden`: the context is one page that holds all
        sequences, and only the attention is training's own.
        """
        drafter = self.drafter
        drafter.bind()
        num_tokens = len(batch.aux)
        kv = empty_kv(drafter, num_tokens, batch.aux.device)
        slots = torch.arange(num_tokens, dtype=torch.int32, device=batch.aux.device)
        drafter.inject(batch.aux, batch.positions, slots, kv)
        return drafter.block_hidden(batch.blocks, batch.anchors, batch.context, kv)


def load_target(
    directory: Path,
    capture_layer_ids: tuple[int, ...],
    dtype: torch.dtype,
    num_positions: int,
    device: torch.device,
) -> Target:
    """The whole target on one device."""
    config = load_target_config(directory)
    with CheckpointReader(directory) as reader:
        target = TARGETS[config.architecture](
            config,
            TensorParallel(),
            reader,
            dtype=dtype,
            num_positions=num_positions,
            capture_layer_ids=capture_layer_ids,
            ops=TrainingOps(),
        )
    return target.to(device)


def load_pair(directory: Path, target: Target, num_positions: int) -> Pair:
    """The drafter in `directory` on its target, in the target's dtype and on its device."""
    config = load_drafter_config(directory)
    weight = target.embed.weight
    with CheckpointReader(directory) as reader:
        drafter = DRAFTERS[config.architecture](
            config,
            TensorParallel(),
            reader,
            target,
            dtype=weight.dtype,
            num_positions=num_positions,
        )
    return Pair(target, drafter.to(weight.device), config)
