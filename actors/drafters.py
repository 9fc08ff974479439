"""The dedicated drafters of one engine on the cluster: started, joined, replaced when they are
lost."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from actors import ranks
from actors.channel import Address, StepChannels, StepFailed
from actors.config import EngineConfig

logger = logging.getLogger("ray.serve")

# In a row, none of which lasted.
_MAX_LOSSES = 5
_LASTED_S = 60.0


class RayDrafters:
    """A `DrafterGroup` of Ray actors.

    Loads on a thread of its own, so that the target goes on meanwhile; all else is called from the
    engine's thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_actors: Callable[[], list[Any]],
        targets: Sequence[Any],
    ) -> None:
        """Starts loading. `make_actors` gives the actors of new drafter ranks, not loaded; the
        target's ranks are `targets`."""
        self._config, self._make_actors, self._targets = config, make_actors, targets
        self._actors: list[Any] = []
        self._channels: StepChannels | None = None  # of those that take part
        self._joined_at = 0.0
        self._num_losses = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafters")
        self._loaded: Future[list[Address]] | None = None
        self._start()

    def wait(self) -> None:
        """See `DrafterGroup`. Raises what loading raised."""
        assert self._loaded is not None
        self._loaded.result()

    def are_joined(self) -> bool:
        """See `DrafterGroup`."""
        if self._channels is not None:
            try:
                self._channels.check()
            except StepFailed as error:
                self._lose(f"{error}")
        return self._channels is not None

    def are_waiting(self) -> bool:
        """See `DrafterGroup`."""
        if self._loaded is None or not self._loaded.done():
            return False
        if (error := self._loaded.exception()) is not None:
            self._lose(f"they could not be loaded: {error}")
            return False
        return True

    def join(self) -> None:
        """See `DrafterGroup`. Raises `RayError` where the target's ranks fail, too."""
        assert self._loaded is not None
        addresses, self._loaded = self._loaded.result(), None
        timeout_s = 2 * self._config.exchange_timeout_s
        try:
            self._meet(timeout_s)
            self._channels = StepChannels(addresses)
        except Exception as error:
            # All of the target's ranks must agree, and one may have joined.
            left = [rank.leave_drafters.remote() for rank in self._targets]
            self._lose(f"they could not be joined: {error}")
            ray.get(left, timeout=timeout_s)
            return
        self._joined_at = time.monotonic()
        logger.info("the drafters take part")

    def lose(self) -> None:
        """See `DrafterGroup`."""
        if self._channels is not None:
            self._lose("the target's ranks lost them")

    def post(self, payload: bytes) -> None:
        """Let them take part in a step, which is not waited for; a loss shows in `are_joined`."""
        if self._channels is None:
            return
        try:
            self._channels.send(payload)
        except StepFailed as error:
            self._lose(f"{error}")

    def close(self) -> None:
        """End all of them, those that load too."""
        self._end()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _meet(self, timeout_s: float) -> None:
        """Let the ranks of target and drafter join one exchange."""
        everyone = [*self._targets, *self._actors]
        hosts = ranks.hosts_of(everyone, timeout_s)
        first = len(self._targets)
        store = ray.get(self._actors[0].open_exchange.remote(hosts[first]), timeout=timeout_s)
        ray.get(
            [
                rank.join_exchange.remote(store, host)
                for rank, host in zip(everyone, hosts, strict=True)
            ],
            timeout=timeout_s,
        )

    def _lose(self, reason: str) -> None:
        """End what is left of them and start others."""
        lasted = self._channels is not None and time.monotonic() - self._joined_at > _LASTED_S
        self._num_losses = 1 if lasted else self._num_losses + 1
        self._end()
        if self._num_losses > _MAX_LOSSES:
            logger.error("lost the drafters %d times in a row: %s", self._num_losses, reason)
            return
        logger.warning("lost the drafters, which cost speed only; starting others: %s", reason)
        self._start()

    def _start(self) -> None:
        self._actors = self._make_actors()
        self._loaded = self._thread.submit(_load, self._config, self._actors)

    def _end(self) -> None:
        if self._channels is not None:
            self._channels.hang_up()
        self._channels = self._loaded = None
        actors, self._actors = self._actors, []
        ranks.kill(actors)


def _load(config: EngineConfig, actors: Sequence[Any]) -> list[Address]:
    """Load and warm up ranks; where they take their steps. Raises what one of them raised."""
    timeout_s = config.load_timeout_s
    ranks.load(actors, timeout_s)
    ray.get([rank.warm_up.remote() for rank in actors], timeout=timeout_s)
    node_id = ray.get_runtime_context().get_node_id()
    addresses: list[Address] = ray.get(
        [rank.listen.remote(node_id) for rank in actors], timeout=timeout_s
    )
    return addresses
