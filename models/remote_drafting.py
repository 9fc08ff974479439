"""A target rank's side of drafters that have ranks of their own."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from models.drafting import DraftInputs
from models.exchange import Exchange, ExchangeShape
from models.parallel import TensorParallel
from models.steps import ModelRank

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Deferred:
    """Drafts that come back with the next step: for `slots [D]`, each `num_drafts [D]` of them."""

    slots: Tensor
    num_drafts: Tensor
    shape: ExchangeShape
    drafts: Tensor | None = None


class RemoteDrafting:
    """Sends what each step verified to the drafters, and gives the slots what they propose.

    Loses them for good when anything goes wrong in between, on all ranks of the target in the same
    step, until they are joined again. Only for the device thread.
    """

    def __init__(self, model: ModelRank, tp: TensorParallel) -> None:
        self.is_lost = True
        self._model, self._tp = model, tp
        self._exchange: Exchange | None = None
        self._deferred: _Deferred | None = None

    def join(self, exchange: Exchange) -> None:
        """Go on with these drafters. All ranks join between the same two steps."""
        self._exchange, self._deferred, self.is_lost = exchange, None, False

    def leave(self) -> None:
        """Go on without drafters. All ranks leave between the same two steps."""
        self._hang_up()
        self.is_lost = True

    def draft(self, inputs: DraftInputs, num_drafts: int, *, defer: bool = False) -> Tensor | None:
        """What `DrafterRank.draft` does, elsewhere: the slots get their drafts `[D, num_drafts]
        int32`, which are also returned. None where there are none, or not yet.

        With `defer` the slots get them in the next call, and have none until then.
        """
        if self.is_lost:
            # The step counted on what it would propose.
            self._model.drop_drafts(inputs.slots)
            return None
        drafts = self._try(inputs, num_drafts, defer)
        if self._tp.size > 1:
            # A rank that has drafts where another has none would verify other tokens.
            lost = torch.tensor([self._exchange is None], dtype=torch.int32)
            self.is_lost = bool(self._tp.all_reduce(lost))
        else:
            self.is_lost = self._exchange is None
        if self.is_lost:
            self._hang_up()
            self._model.drop_drafts(inputs.slots)
            return None
        deferred, self._deferred = self._deferred, None
        if deferred is not None and deferred.drafts is not None:
            # Slots that have emitted since are beyond these drafts.
            is_old = (deferred.slots.unsqueeze(1) == inputs.slots).any(1)
            slots = torch.where(is_old, self._model.state.scratch_slot, deferred.slots)
            self._model.write_drafts(slots, deferred.drafts, deferred.num_drafts)
        if defer and num_drafts:
            counts = self._model.state.num_drafts[inputs.slots]
            shape = ExchangeShape.of(inputs, num_drafts)
            self._deferred = _Deferred(inputs.slots, counts, shape)
            self._model.drop_drafts(inputs.slots)
        elif drafts is not None:
            self._model.write_drafts(inputs.slots, drafts)
        return drafts

    def _try(self, inputs: DraftInputs, num_drafts: int, defer: bool) -> Tensor | None:
        """The drafts, if any; leaves the exchange where it fails."""
        assert self._exchange is not None
        try:
            self._exchange.send(inputs)
            if self._deferred is not None:
                self._deferred.drafts = self._exchange.receive_back(self._deferred.shape)
            if num_drafts and not defer:
                return self._exchange.receive_back(ExchangeShape.of(inputs, num_drafts))
        except RuntimeError as error:
            logger.warning("the drafters are lost: %s", error)
            self._hang_up()
        return None

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()
        self._exchange = None
