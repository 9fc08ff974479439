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
# A request that was in flight in so many processes that died, without a token, may be the cause.
_MAX_DEATHS = 3


def resuming(engine: Engine) -> Engine:
    """`engine`, but a request whose replica is lost goes to another, or to the one that takes its
    place, and goes on behind the tokens that came. What is raised is the last loss, where no token
    came for `_GIVE_UP_AFTER_S` behind it or after `_MAX_DEATHS`.
    """

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        lost_at: float | None = None
        num_deaths = 0
        while True:
            try:
                async with aclosing(engine(request)) as chunks:
                    async for chunk in chunks:
                        lost_at, num_deaths = None, 0
                        request = _behind(request, chunk)
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
                return
            except Exception as error:
                now, loss = time.monotonic(), unwrap(error)
                is_lost = isinstance(loss, _LOSSES)
                if not is_lost and not (lost_at is not None and isinstance(loss, EngineOverloaded)):
                    raise
                lost_at = now if lost_at is None else lost_at
                num_deaths += isinstance(loss, RayActorError)
                if now - lost_at > _GIVE_UP_AFTER_S or num_deaths == _MAX_DEATHS:
                    raise
                logger.warning("request %s: %s; going on elsewhere", request.request_id, loss)
            await asyncio.sleep(_RETRY_AFTER_S)

    return generate


def _behind(request: GenerateRequest, chunk: TokenChunk) -> GenerateRequest:
    """`request` as another engine gets it, once `chunk` has come."""
    emitted = request.emitted_token_ids
    fresh = chunk.token_ids[len(emitted) - chunk.first_index :]
    return replace(
        request, emitted_token_ids=emitted + fresh, emitted_speculation=chunk.speculation
    )
