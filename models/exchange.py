"""Where the ranks of a target and of its dedicated drafters meet, once a step."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from models.backends import gloo
from models.drafting import DraftInputs


def open_store(host: str) -> TCPStore:
    """A store at `host`, on a port that is free, for the ranks of an exchange to meet at."""
    return gloo.open_store(gloo.listen(host), host)


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """What one step exchanges: N token rows of `width` captured values, D emitting rows with query
    blocks of `block` tokens, and `num_drafts` drafts back for each (0: nothing comes back)."""

    num_tokens: int
    width: int
    emitting_rows: int
    block: int
    num_drafts: int
    dtype: torch.dtype

    @classmethod
    def of(cls, inputs: DraftInputs, num_drafts: int) -> "ExchangeShape":
        """That of a step which verified `inputs` and proposes so many drafts."""
        (num_tokens, width), (emitting_rows, block) = inputs.aux.shape, inputs.blocks.shape
        return cls(num_tokens, width, emitting_rows, block, num_drafts, inputs.aux.dtype)

    @property
    def num_ints(self) -> int:
        """Everything of `DraftInputs` but the captured states."""
        return 2 * self.num_tokens + self.emitting_rows * (2 + self.block)


class Exchange:
    """One rank's end of a group of its own, target ranks first, then drafter ranks.

    The captured states go over in equal slices, one from each target rank, in one gather. Whatever
    fails here raises `RuntimeError`, and then the group is of no more use; the target's own group
    is not touched by it.
    """

    def __init__(self, group: dist.ProcessGroup, num_targets: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._num_targets, self._size, self._rank = num_targets, group.size(), group.rank()

    def leave(self) -> None:
        """Hang up, so that whoever waits for this rank fails too."""
        self._group = None

    def send(self, inputs: DraftInputs) -> None:
        """On every target rank: let the drafters have what was verified."""
        flat = inputs.aux.flatten()
        size = -(-flat.numel() // self._num_targets)
        flat = F.pad(flat, (0, size * self._num_targets - flat.numel()))
        self._gather(flat[self._rank * size :][:size])
        self._broadcast(inputs.packed(), root=0)

    def receive(self, shape: ExchangeShape) -> DraftInputs:
        """On every drafter rank: what the target ranks send."""
        count = shape.num_tokens * shape.width
        parts = self._gather(torch.zeros(-(-count // self._num_targets), dtype=shape.dtype))
        aux = torch.cat(parts[: self._num_targets])[:count]
        ints = self._broadcast(torch.zeros(shape.num_ints, dtype=torch.int32), root=0)
        return DraftInputs.unpack(aux.view(-1, shape.width), ints, shape.emitting_rows)

    def send_back(self, drafts: Tensor) -> None:
        """On every drafter rank: let the target ranks have `drafts [D, n] int32`."""
        self._broadcast(drafts.contiguous(), root=self._num_targets)

    def receive_back(self, shape: ExchangeShape) -> Tensor:
        """On every target rank: the drafts `[D, n] int32`."""
        drafts = torch.zeros(shape.emitting_rows, shape.num_drafts, dtype=torch.int32)
        return self._broadcast(drafts, root=self._num_targets)

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self._size)]
        self._joined.allgather([parts], [part.contiguous()]).wait()
        return parts

    def _broadcast(self, values: Tensor, root: int) -> Tensor:
        self._joined.broadcast(values, root).wait()
        return values

    @property
    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left the exchange")
        return self._group


def join_exchange(
    store: str, host: str, rank: int, num_targets: int, num_drafters: int, timeout_s: float
) -> Exchange:
    """Meet the others at `store`, a `host:port` of `open_store`; no call of the exchange then takes
    longer than `timeout_s`. This rank listens at `host` only.

    Raises `RuntimeError` where not all of them come.
    """
    timeout = timedelta(seconds=timeout_s)
    store_host, _, port = store.rpartition(":")
    client = TCPStore(
        store_host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
    )
    group = gloo.group_apart(client, host, rank, num_targets + num_drafters, timeout)
    return Exchange(group, num_targets)
