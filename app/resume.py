"""A stream that goes on where it was when the engine behind it is lost."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from actors.errors import EngineDead, EngineOverloaded
from actors.messages import GenerateRequest, TokenChunk
from app.errors import unwrap
from app.service import Engine

logger = logging.getLogger(__name__)

_LOSSES = (EngineDead, RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)
# As long as it takes Serve to find out that a replica is lost and to make another.
_GIVE_UP_AFTER_S = 180.0
_RETRY_AFTER_S = 0.5
# A request that was served by so many engines that were lost, or in a row without a token, may be
# the cause.
_MAX_LOSSES = 16
_MAX_LOSSES_IN_A_ROW = 3


def resuming(engine: Engine) -> Engine:
    """`engine`, but a request whose replica is lost goes to another, or to the one that takes its
    place, and goes on behind the tokens that came. What is raised is the last loss, where no token
    came for `_GIVE_UP_AFTER_S` behind it or the request may be the cause of so many.
    """

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        journey = _Journey(request)
        while True:
            try:
                async with aclosing(engine(journey.next_request())) as chunks:
                    async for chunk in _in_time(chunks, journey):
                        journey.went_on(chunk)
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
                return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Not by whoever reads this stream, so Serve has cancelled the call.
                journey.lost(EngineDead("the call was cancelled"))
            except Exception as error:
                journey.lost(error)
            await asyncio.sleep(_RETRY_AFTER_S)

    return generate


class _Journey:
    """One request on its way through engines."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_tries = 0
        self._num_losses = 0
        self._num_in_a_row = 0
        self._loss: Exception | None = None
        self._lost_at = 0.0
        self._is_served = False

    @property
    def left_s(self) -> float | None:
        """How long to wait for a token that would end a loss; None where there is none."""
        if self._loss is None:
            return None
        return max(0.0, self._lost_at + _GIVE_UP_AFTER_S - time.monotonic())

    def next_request(self) -> GenerateRequest:
        """For the next engine. An engine that lives, to which only a connection was lost, may still
        know it under the last one's id."""
        self._num_tries += 1
        self._is_served = False
        if self._num_tries == 1:
            return self._request
        return replace(self._request, request_id=f"{self._request.request_id}-{self._num_tries}")

    def went_on(self, chunk: TokenChunk) -> None:
        emitted = self._request.emitted_token_ids
        fresh = chunk.token_ids[len(emitted) - chunk.first_index :]
        self._request = replace(
            self._request,
            emitted_token_ids=emitted + fresh,
            emitted_speculation=chunk.speculation,
        )
        self._loss, self._num_in_a_row, self._is_served = None, 0, True

    def lost(self, error: Exception) -> None:
        """Raises `error` where the request does not go on behind it."""
        loss = unwrap(error)
        if isinstance(loss, TimeoutError) and self._loss is not None:
            raise self._loss
        is_crowded = isinstance(loss, EngineOverloaded) and self._loss is not None
        if not isinstance(loss, _LOSSES) and not is_crowded:
            raise error
        if self._loss is None:
            self._loss, self._lost_at = error, time.monotonic()
        # An engine that is known to be lost raises again until there is another.
        if self._is_served or isinstance(loss, RayActorError):
            self._num_losses += 1
            self._num_in_a_row += 1
        if self.left_s == 0.0 or self._num_losses == _MAX_LOSSES:
            raise error
        if self._num_in_a_row == _MAX_LOSSES_IN_A_ROW:
            raise error
        logger.warning("request %s: %s; going on elsewhere", self._request.request_id, loss)


async def _in_time(
    chunks: AsyncGenerator[TokenChunk, None], journey: _Journey
) -> AsyncGenerator[TokenChunk, None]:
    """`chunks`; raises `TimeoutError` where none comes that would end a loss."""
    while True:
        try:
            async with asyncio.timeout(journey.left_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        yield chunk
