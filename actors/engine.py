"""The step loop of one engine: plan, run on every rank, update, deliver."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from actors.config import EngineConfig
from actors.errors import EngineDead, ShardsLost
from actors.grammar import Grammars
from actors.limits import check_request
from actors.messages import (
    GenerateRequest,
    StepOutput,
    StepPlan,
    TokenChunk,
    decode_output,
    encode,
)
from actors.scheduler import LeaveOut, Scheduler
from actors.trace import Trace
from actors.warm_up import WarmUp

logger = logging.getLogger(__name__)

# How often an idle engine with dedicated drafters looks after them.
_DRAFTER_WATCH_S = 1.0


class DrafterGroup(Protocol):
    """The dedicated drafters of an engine: those that take part in its steps, or their successors.

    Whoever was lost is replaced without being asked for.
    """

    def wait(self) -> None:
        """Return once those that load are ready to `join`. Raises where they can't be loaded."""

    def are_joined(self) -> bool:
        """Whether they take part."""

    def are_waiting(self) -> bool:
        """Whether others are ready to `join`."""

    def join(self) -> None:
        """Let those that wait take part from the next step on; no output may be unread. Where that
        fails they are lost."""

    def lose(self) -> None:
        """The target's ranks have lost them: end all of them."""


class ShardGroup(Protocol):
    """All ranks of one engine, driven in lockstep. `drafters` is None where they are not
    dedicated."""

    @property
    def drafters(self) -> DrafterGroup | None: ...

    def step(self, payload: bytes) -> bytes:
        """Submit an encoded `StepPlan` to every rank; the encoded output of the step before.

        Raises where a rank failed or did not answer in time.
        """

    def seal(self) -> None:
        """Warm-up is over: from now on steps are quick, and nothing new should be compiled."""

    def close(self) -> None:
        """End all ranks; does nothing where they have ended."""


class Engine:
    """Owns the scheduler and drives the shards, from one thread: whoever calls `step` or `run`.

    `check`, `add`, `abort`, `lose` and `stop` may be called from any thread; what they ask for
    takes effect between two steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        shards: ShardGroup,
        deliver: Callable[[list[TokenChunk]], None],
        *,
        leave_out: LeaveOut | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`deliver` is called once for each step that was read, on the engine's thread, with that
        step's chunks. `leave_out` is the scheduler's. `trace` gets what the host does.
        """
        self.config = config
        self._grammars = Grammars(
            config.target_path,
            vocab_size=config.target.vocab_size,
            eos_token_ids=config.target.eos_token_ids,
        )
        self.scheduler = Scheduler(config, grammars=self._grammars, leave_out=leave_out)
        self._leave_out = leave_out
        self._trace = trace
        self._shards = shards
        self._deliver = deliver
        self._inbox: deque[GenerateRequest | str] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._loss = ""
        self._busy_since = 0.0
        self._warm_up = WarmUp(self.scheduler.ladder, self._exchange)

    def check(self, message: GenerateRequest) -> None:
        """Raises `RequestRejected` where a request could never be served. Takes up to a second
        where its guide is new."""
        check_request(self.config, message)
        if message.sampling.guide is not None:
            self._grammars.check(message.sampling.guide)

    def is_ready(self, message: GenerateRequest) -> bool:
        """Whether `check` takes no time."""
        guide = message.sampling.guide
        return guide is None or self._grammars.is_ready(guide)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request. Raises `RequestRejected` where it could never be served."""
        self.check(message)
        self._post(message)

    def add_all(self, messages: Sequence[GenerateRequest]) -> None:
        """Queue several requests, or none of them. Raises `RequestRejected`."""
        for message in messages:
            self.check(message)
        for message in messages:
            self._post(message)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; one that has ended already is left alone."""
        self._post(request_id)

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Run every kind of step once on padding alone, so that everything is compiled before the
        first request, then seal the shards. Dedicated drafters, which do so by themselves, join.

        `on_progress` is told how many steps of how many are done. Raises `EngineDead` where the
        shards failed.
        """
        self._warm_up.run(on_progress)
        if self._drafters is not None:
            self._drafters.wait()
            self._drafters.join()
        self._shards.seal()
        if self.config.adaptive_drafts:
            self._warm_up.measure(
                self.scheduler.speculation,
                is_dedicated=self.config.is_dedicated,
                overlaps=self.config.overlap == "auto",
            )

    def stop(self) -> None:
        """Make `run` return, after the step it is in."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def lose(self, reason: str) -> None:
        """Make `run` raise `ShardsLost`: a rank is gone, which a step may not find out soon."""
        with self._wake:
            self._loss = reason
            self._wake.notify()

    def run(self) -> None:
        """Step while there is work, sleep while there is none, until `stop`.

        Dedicated drafters are looked after meanwhile.

        Raises `ShardsLost` where a rank was lost, and then `restart` lets it go on; `EngineDead`
        where an output does not fit its plan, and then nothing does.
        """
        while True:
            with self._wake:
                self._wake.wait_for(self._is_due, _DRAFTER_WATCH_S if self._drafters else None)
                if self._stopped:
                    return
                loss = self._loss
            if loss:
                self._shards.close()
                raise ShardsLost(loss)
            self.step()

    def restart(self, shards: ShardGroup) -> None:
        """Go on with other ranks from what was emitted. Call it where `run` has raised
        `ShardsLost`.

        They are warmed up between the steps that requests wait for.
        """
        self._read_inbox()
        self._shards, self._loss = shards, ""
        self._warm_up.postpone()
        if given_up := self.scheduler.restart():
            self._deliver(given_up)

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def step(self) -> bool:
        """Submit one step, or none where all that is left is to read, and read the one before it.

        Without `async_scheduling`, the submitted step is read too. Returns whether there is work
        left, a step to read included. Raises `EngineDead` where the shards failed.
        """
        self._read_inbox()
        if self._drafters is not None:
            self._look_after(self._drafters)
        if self.scheduler.has_work:
            plan = self._schedule()
            self._run(plan)
            if not self.config.async_scheduling:
                self._run(StepPlan(step=plan.step))
        if self._warm_up.is_turn(has_work=self.scheduler.has_work):
            self._drain()
            self._warm_up.catch_up()
            if not self._warm_up.is_missing:
                self._shards.seal()
        self._read_inbox()
        if not self.scheduler.has_work:
            self.scheduler.check_idle()
        return self.scheduler.has_work

    def close(self) -> None:
        """End what checking requests started; the shards are the caller's."""
        self._grammars.close()

    def abandon(self) -> None:
        """End every request, wherever `step` was interrupted, and leave no output to be read.

        Nothing is delivered. Raises `EngineDead` where the shards failed.
        """
        self._inbox.clear()
        # An interrupt may have come between any two counters, so nothing of them is kept.
        old = self.scheduler
        self.scheduler = Scheduler(self.config, grammars=self._grammars, leave_out=self._leave_out)
        self.scheduler.stats, self.scheduler.speculation = old.stats, old.speculation
        old.stats.requests["abort"] += old.num_requests
        self._exchange(StepPlan(step=0))

    @property
    def _drafters(self) -> DrafterGroup | None:
        return self._shards.drafters if self.config.is_dedicated else None

    def _look_after(self, drafters: DrafterGroup) -> None:
        """Let speculation end and begin with dedicated drafters."""
        if self.scheduler.has_drafter and not drafters.are_joined():
            self.scheduler.lose_drafter()
        if not self.scheduler.has_drafter and drafters.are_waiting():
            self._drain()
            try:
                drafters.join()
            except Exception as error:
                logger.error("a shard failed when drafters joined: %r", error)
                self._shards.close()
                raise ShardsLost(f"a shard failed when drafters joined: {error!r}") from error
            if drafters.are_joined():
                self.scheduler.regain_drafter()

    def _schedule(self) -> StepPlan:
        if self._trace is None:
            return self.scheduler.schedule()
        with self._trace.span("schedule", "engine") as args:
            plan = self.scheduler.schedule()
            if plan.bucket is not None:
                args["step"] = plan.step
        return plan

    def _drain(self) -> None:
        """Read what is unread."""
        if self.scheduler.num_unread:
            self._run(StepPlan(step=0))

    def _run(self, plan: StepPlan) -> None:
        """Submit `plan`; take in and deliver what the step before it emitted, if there is one."""
        num_before = self.scheduler.num_unread - (plan.bucket is not None)
        if num_before == 0:
            self._busy_since = time.perf_counter()
        output = self._exchange(plan)
        with self._fatal(plan):
            assert (output is not None) == (num_before > 0), "a step was lost in the pipeline"
            chunks = None if output is None else self.scheduler.update(output, self._lap_s())
        if chunks is not None:
            self._deliver(chunks)

    def _lap_s(self) -> float:
        """Seconds since the output before was read, or since a step was submitted to an idle
        device."""
        since, self._busy_since = self._busy_since, time.perf_counter()
        return self._busy_since - since

    def _exchange(self, plan: StepPlan) -> StepOutput | None:
        """Submit `plan`, empty or not; the output of the step before it. Raises `ShardsLost`."""
        if self._trace is not None and plan.bucket is not None:
            self._trace.instant("submit", "engine", step=plan.step)
        try:
            answer = self._shards.step(encode(plan))
        except Exception as error:
            logger.error("step %d failed: %r", plan.step, error)
            self._shards.close()
            raise ShardsLost(f"a shard failed in step {plan.step}: {error!r}") from error
        with self._fatal(plan):
            output = decode_output(answer)
        if output is not None and output.drafters_lost and self._drafters is not None:
            self._drafters.lose()
        if self._trace is not None and output is not None:
            self._trace.instant("read", "engine", step=output.step)
        return output

    @contextmanager
    def _fatal(self, plan: StepPlan) -> Iterator[None]:
        """Whatever fails inside loses the engine: an output and its plan do not fit."""
        try:
            yield
        except Exception as error:
            logger.error("step %d failed: %r", plan.step, error)
            self._shards.close()
            raise EngineDead(f"step {plan.step} failed: {error!r}") from error

    def _is_due(self) -> bool:
        return bool(
            self._stopped
            or self._loss
            or self._inbox
            or self._warm_up.is_missing
            or self.scheduler.has_work
        )

    def _post(self, item: GenerateRequest | str) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self.scheduler.abort(item)
            else:
                self._start(item)

    def _start(self, message: GenerateRequest) -> None:
        """Let a request wait for its steps; it alone is given up where that fails."""
        try:
            self.scheduler.add(message)
        except Exception:
            logger.exception("request %s can't be started", message.request_id)
            self.scheduler.stats.requests["error"] += 1
            self._deliver(
                [
                    TokenChunk(
                        request_id=message.request_id,
                        first_index=len(message.emitted_token_ids),
                        token_ids=(),
                        finish_reason="abort",
                    )
                ]
            )
