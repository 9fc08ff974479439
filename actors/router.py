"""The Router: a Serve replica that is one engine, its step loop on a thread of its own."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future

import ray
from ray.util import get_current_placement_group

from actors.config import EngineConfig
from actors.delivery import Delivery
from actors.errors import EngineDead, EngineOverloaded
from actors.messages import GenerateRequest, TokenChunk
from actors.metrics import EngineMetrics
from actors.placement import RayShardGroup
from actors.supervisor import Supervisor

logger = logging.getLogger("ray.serve")

_METRICS_PERIOD_S = 1.0
_PING_TIMEOUT_S = 10.0
# How long a shutdown waits for the step in progress.
_LAST_STEP_S = 5.0


def max_requests(config: EngineConfig) -> int:
    """Requests an engine runs and queues at once.

    What is beyond is refused by the router and not by Serve, whose bound counts late in a burst
    and would refuse health checks too.
    """
    return max(512, 4 * config.max_num_seqs)


class Router:
    """Streams tokens for requests; `app.main` deploys it with `actors.placement.bundles`.

    Lost shards are replaced, and streams go on; where that fails, every stream ends with
    `EngineDead` and the replica is unhealthy, so that Serve replaces it.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Returns once every rank is loaded and warm. Raises what a rank raised."""
        self._config = config
        self._streams: dict[str, asyncio.Queue[TokenChunk | EngineDead]] = {}
        self._delivery = Delivery(config.stream_interval_s)
        self._failure: EngineDead | None = None
        self._group = get_current_placement_group()
        # Where streams are served; known with the first request.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publisher: asyncio.Task[None] | None = None
        ready: Future[Supervisor[RayShardGroup]] = Future()
        self._thread = threading.Thread(
            target=self._drive, args=(ready,), name="engine", daemon=True
        )
        self._thread.start()
        self._supervisor = ready.result()
        self._engine = self._supervisor.engine

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """At most one chunk per step or `stream_interval_s`, the last with a `finish_reason`.

        Closing the iterator aborts the request. Raises `RequestRejected` where it could never be
        served, `EngineOverloaded` where `max_requests` are in, `EngineDead` where the engine is
        lost.
        """
        if not self._engine.is_ready(request):
            await asyncio.to_thread(self._engine.check, request)
        # Known to the engine's thread before the failure is looked at: a failure after that look
        # finds this stream.
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._publisher = self._loop.create_task(self._publish_metrics())
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        limit = max_requests(self._config)
        if len(self._streams) >= limit:
            raise EngineOverloaded(f"the engine has {limit} requests, its limit")
        queue: asyncio.Queue[TokenChunk | EngineDead] = asyncio.Queue()
        self._engine.add(request)
        self._streams[request.request_id] = queue
        try:
            while True:
                item = await queue.get()
                if isinstance(item, EngineDead):
                    raise EngineDead(str(item))
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            del self._streams[request.request_id]
            self._engine.abort(request.request_id)

    async def check(self) -> None:
        """Raises `EngineDead` where a request would have to wait for ranks, or for ever."""
        if not await self._all_answer():
            raise EngineDead("not all shards answer now")

    async def check_health(self) -> None:
        """Serve's own health check: raises `EngineDead` where the replica is of no more use."""
        await self._all_answer()

    async def _all_answer(self) -> bool:
        """Whether all ranks are there. One that is gone is replaced from here where no step finds
        it, since there is nothing to do; one that does not answer has the deadline of its step.

        Raises `EngineDead` where the engine is lost.
        """
        if self._failure is None and not self._thread.is_alive():
            self._fail(EngineDead("the engine's loop has ended"))
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        shards = self._supervisor.shards
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await asyncio.gather(*(shard.ping.remote() for shard in shards.actors))
        except (TimeoutError, ray.exceptions.ActorUnavailableError):
            return False
        except Exception as error:
            if shards is self._supervisor.shards:
                self._engine.lose(f"a shard does not answer: {type(error).__name__}")
            return False
        return not self._supervisor.is_recovering

    async def free_pages(self) -> tuple[int, int]:
        """KV pages that are free, and all that requests could have."""
        pool = self._engine.scheduler.pool
        return pool.num_free, pool.num_usable

    def __del__(self) -> None:
        """Serve calls this when the replica is shut down in good order."""
        if not hasattr(self, "_supervisor"):  # Serve comes here after a failed __init__ too
            return
        if self._publisher is not None:
            self._publisher.cancel()
        self._engine.stop()
        self._fail(EngineDead("the engine is shutting down"))
        self._thread.join(_LAST_STEP_S)
        if self._thread.is_alive():  # in a step that does not end: its ranks end it
            self._supervisor.shards.close()
            self._thread.join(_LAST_STEP_S)

    def _drive(self, ready: "Future[Supervisor[RayShardGroup]]") -> None:
        """The engine's thread: places the shards, steps them, replaces them, ends them."""
        supervisor = None
        try:
            supervisor = Supervisor(
                self._config,
                lambda: RayShardGroup(self._config, self._group),
                self._deliver,
                _log_progress,
            )
            ready.set_result(supervisor)
            supervisor.run()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
                return
            logger.exception("the engine is lost")
            dead = error if isinstance(error, EngineDead) else EngineDead(f"loop crashed: {error}")
            self._failure = dead
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail, dead)
        finally:
            if supervisor is not None:
                supervisor.close()

    def _fail(self, error: EngineDead) -> None:
        self._failure = error
        # Their aborts will find nobody to count them.
        self._engine.scheduler.stats.requests["error"] += len(self._streams)
        for queue in self._streams.values():
            queue.put_nowait(error)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        assert self._loop is not None, "a request has come through generate()"
        if due := self._delivery.push(chunks):
            self._loop.call_soon_threadsafe(self._dispatch, due)

    def _dispatch(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            # A stream that is gone has aborted its request; this step was planned before that.
            if queue := self._streams.get(chunk.request_id):
                queue.put_nowait(chunk)

    async def _publish_metrics(self) -> None:
        metrics = EngineMetrics(self._config.served_model_name)
        while True:
            await asyncio.sleep(_METRICS_PERIOD_S)
            try:
                metrics.publish(self._engine.scheduler.stats)
            except Exception:  # counters catch up with the next publication
                logger.exception("metrics were not published")


def _log_progress(done: int, total: int) -> None:
    if done % 5 == 0 or done == total:
        logger.info("warm-up: %d of %d steps compiled and run", done, total)
