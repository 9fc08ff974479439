"""Keeps one engine going: makes its ranks, and others where some are lost."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from actors.config import EngineConfig
from actors.engine import Engine, ShardGroup
from actors.errors import EngineDead, ShardsLost
from actors.messages import TokenChunk
from actors.request import PROGRESS_TOKENS

logger = logging.getLogger(__name__)

# In a row, without progress between them. A request that crashes whatever it runs on takes three
# until it is given up, and another one that came with it one more.
MAX_LOSSES = 5

Shards = TypeVar("Shards", bound=ShardGroup)


class Supervisor(Generic[Shards]):
    """Runs an engine on one thread. Whoever streams from it notices no more than a pause when ranks
    are lost: all of them are ended, others are made, and requests go on from what they emitted.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_shards: Callable[[], Shards],
        deliver: Callable[[list[TokenChunk]], None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make and warm up the engine; `deliver` and `on_progress` are the engine's. Raises what
        `make_shards` raises, and `EngineDead`."""
        self.is_recovering = False
        self.shards = make_shards()
        self.engine = Engine(config, self.shards, deliver)
        self._make_shards = make_shards
        self._num_losses = 0
        self._emitted_at_loss = 0
        try:
            self.engine.warm_up(on_progress)
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Returns after `Engine.stop`. Raises `EngineDead` where the engine can't go on."""
        while True:
            try:
                self.engine.run()
                return
            except ShardsLost as loss:
                self._recover(loss)

    def close(self) -> None:
        """End every rank, and what the engine started."""
        self.shards.close()
        self.engine.close()

    def _recover(self, loss: Exception) -> None:
        """Go on with other ranks, or give up."""
        self.is_recovering = True
        while not self.engine.is_stopped:
            self._count(loss)
            logger.warning("%s; starting other shards, and requests go on from there", loss)
            try:
                self.shards.close()
                self.shards = self._make_shards()
                if self.engine.is_stopped:
                    break
                self.engine.restart(self.shards)
            except Exception as another:
                loss = another
                continue
            self.engine.scheduler.stats.recoveries += 1
            break
        self.is_recovering = False

    def _count(self, loss: Exception) -> None:
        """Raises `EngineDead` where there were too many losses without progress between them."""
        num_emitted = self.engine.scheduler.stats.output_tokens
        progressed = num_emitted >= self._emitted_at_loss + PROGRESS_TOKENS
        self._num_losses = 1 if progressed else self._num_losses + 1
        self._emitted_at_loss = num_emitted
        if self._num_losses > MAX_LOSSES:
            raise EngineDead(f"lost its shards {MAX_LOSSES + 1} times in a row: {loss}") from loss
