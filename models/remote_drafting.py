"""A target rank's side of drafters that have ranks of their own."""

import logging

import torch
from torch import Tensor

from models.drafting import DraftInputs
from models.exchange import Exchange, ExchangeShape
from models.parallel import TensorParallel
from models.steps import ModelRank

logger = logging.getLogger(__name__)


class RemoteDrafting:
    """Sends what each step verified to the drafters, and gives the slots what they propose.

    Loses them for good when anything goes wrong in between, on all ranks of the target in the same
    step, until they are joined again. Only for the device thread.
    """

    def __init__(self, model: ModelRank, tp: TensorParallel) -> None:
        self.is_lost = True
        self._model, self._tp = model, tp
        self._exchange: Exchange | None = None

    def join(self, exchange: Exchange) -> None:
        """Go on with these drafters. All ranks join between the same two steps."""
        self._exchange, self.is_lost = exchange, False

    def leave(self) -> None:
        """Go on without drafters. All ranks leave between the same two steps."""
        self._hang_up()
        self.is_lost = True

    def draft(self, inputs: DraftInputs, num_drafts: int) -> Tensor | None:
        """What `DrafterRank.draft` does, elsewhere: the slots get their drafts `[D, num_drafts]
        int32`, which are also returned. None where there are none."""
        if self.is_lost:
            return None
        drafts = self._try(inputs, num_drafts)
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
        if drafts is not None:
            self._model.write_drafts(inputs.slots, drafts)
        return drafts

    def _try(self, inputs: DraftInputs, num_drafts: int) -> Tensor | None:
        """The drafts, if any; leaves the exchange where it fails."""
        assert self._exchange is not None
        shape = ExchangeShape.of(inputs, num_drafts)
        try:
            self._exchange.send(inputs)
            return self._exchange.receive_back(shape) if num_drafts else None
        except RuntimeError as error:
            logger.warning("the drafters are lost: %s", error)
            self._hang_up()
            return None

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()
        self._exchange = None
