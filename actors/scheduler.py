"""Decides what each step computes. Pure: it sees counters and pages, never a tensor or a process.

There are no phases. Every request has `num_computed`; a step feeds some of the tokens it still
lacks, and prefill, chunked prefill and verification differ only in where those tokens are known.
"""

from collections import deque

from actors.buckets import BucketLadder
from actors.config import EngineConfig
from actors.messages import (
    DecodeRow,
    GenerateRequest,
    PageUpdate,
    PrefillRow,
    StepOutput,
    StepPlan,
    TokenChunk,
)
from actors.page_pool import PagePool
from actors.request import Request
from actors.stats import EngineStats


class Scheduler:
    """Continuous batching with chunked prefill: decode rows first, prefill with what is left.

    A request is admitted when the pages for its longest possible output are free, so a running
    request never waits for pages.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = EngineStats()
        self.pool = PagePool(config.num_kv_pages)
        self.ladder = BucketLadder.for_config(config)
        self._free_slots = list(range(config.num_slots - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by slot, in order of admission
        self._requests: dict[str, Request] = {}
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request that passed `limits.check_request`."""
        assert message.request_id not in self._requests
        sampling = message.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(self.config.target.eos_token_ids)
        request = Request(
            message=message,
            stop_token_ids=frozenset(stops),
            max_len=min(
                len(message.prompt_token_ids) + sampling.max_tokens, self.config.max_model_len
            ),
        )
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self.stats.prompt_tokens += len(message.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        """End a request at once and free what it holds; unknown ids have ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._release(request)

    def schedule(self) -> StepPlan:
        """The next step; an empty plan when there is nothing to compute."""
        updates = self._admit()
        decode = [self._decode_row(slot, r) for slot, r in self._running.items() if _is_decode(r)]
        chunks = self._chunks(len(decode))
        if not decode and not chunks:
            return StepPlan(step=self._step)
        self._step += 1
        width = self.ladder.prefill_width([count for _, count in chunks]) if chunks else 0
        prefill = [row for slot, count in chunks for row in self._prefill_rows(slot, count, width)]
        ends = [row.position + row.num_drafts + 1 for row in decode]
        ends += [row.start + len(row.token_ids) for row in prefill]
        return StepPlan(
            step=self._step,
            bucket=self.ladder.bucket(
                num_decode=len(decode),
                num_drafts=max((row.num_drafts for row in decode), default=0),
                num_prefill_rows=len(prefill),
                prefill_width=width,
                num_emitting=len(decode) + sum(row.last for row in prefill),
                context_pages=-(-max(ends) // self.config.block_size),
            ),
            decode=tuple(decode),
            prefill=tuple(prefill),
            page_updates=tuple(updates),
        )

    def update(self, plan: StepPlan, output: StepOutput) -> list[TokenChunk]:
        """Advance by what survived `plan`; returns one chunk per request that emitted."""
        assert output.step == plan.step
        for row in plan.prefill:
            self._running[row.slot].num_computed += len(row.token_ids)
            self._mark_injected(self._running[row.slot])
        emitting: list[DecodeRow | PrefillRow] = [*plan.decode]
        emitting += [row for row in plan.prefill if row.last]
        rows = zip(emitting, output.sampled, output.num_drafts, strict=True)
        return [self._emit(row, sampled, num_drafts) for row, sampled, num_drafts in rows]

    def check_idle(self) -> None:
        """Assert that nothing is held while nothing runs."""
        assert not self._requests
        assert not self._running
        assert not self._waiting
        assert len(self._free_slots) == self.config.num_slots
        assert self.pool.num_free == self.pool.num_usable
        self.pool.check()

    def _admit(self) -> list[PageUpdate]:
        """Start waiting requests, oldest first, while slots and pages last."""
        updates = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            needed = pages_needed(request.max_len, self.config.block_size)
            if needed > self.pool.num_free:
                break
            self._waiting.popleft()
            request.slot = self._free_slots.pop()
            request.pages = self.pool.allocate(needed)
            self._running[request.slot] = request
            updates.append(PageUpdate(slot=request.slot, first=0, pages=tuple(request.pages)))
        return updates

    def _decode_row(self, slot: int, request: Request) -> DecodeRow:
        sampling = request.message.sampling
        # The last token a request may emit is never fed, nor are drafts that could not be emitted.
        num_drafts = min(self.config.num_drafts, request.num_left - 1)
        return DecodeRow(
            slot=slot,
            position=request.num_computed,
            num_drafts=num_drafts,
            propose=self._proposes(request),
            temperature=sampling.temperature,
            seed=sampling.seed,
        )

    def _proposes(self, request: Request) -> bool:
        """Drafts are of use only where another step may still verify one."""
        return self.config.num_drafts > 0 and request.num_left > 2

    def _chunks(self, num_decode: int) -> list[tuple[int, int]]:
        """`(slot, tokens)` to prefill within what decode leaves of the token budget."""
        budget = self.config.max_num_batched_tokens - num_decode * self.ladder.verify_widths[-1]
        chunks = []
        for slot, request in self._running.items():
            count = min(request.prefill_len - request.num_computed, budget)
            if count > 0:
                chunks.append((slot, count))
                budget -= count
        return chunks

    def _prefill_rows(self, slot: int, count: int, width: int) -> list[PrefillRow]:
        request = self._running[slot]
        sampling = request.message.sampling
        end = request.num_computed + count
        rows = []
        for start in range(request.num_computed, end, width):
            stop = min(start + width, end)
            rows.append(
                PrefillRow(
                    slot=slot,
                    start=start,
                    token_ids=request.message.prompt_token_ids[start:stop],
                    fresh=start == 0,
                    last=stop == request.prefill_len,
                    propose=self._proposes(request),
                    temperature=sampling.temperature,
                    seed=sampling.seed,
                )
            )
        return rows

    def _emit(
        self, row: DecodeRow | PrefillRow, sampled: tuple[int, ...], num_drafts: int
    ) -> TokenChunk:
        request = self._running[row.slot]
        assert sampled, "an emitting row emits at least one token"
        first_index = len(request.output_token_ids)
        kept = request.append(sampled)
        self.stats.output_tokens += len(kept)
        if isinstance(row, DecodeRow):
            request.num_computed += len(sampled)
            request.verify_steps += 1
            request.draft_tokens += num_drafts
            request.verified_output += len(kept)
            self.stats.count_verify(num_drafts, len(kept))
            self._mark_injected(request)
        if request.finish_reason is not None:
            self._release(request)
        return TokenChunk(
            request_id=request.request_id,
            first_index=first_index,
            token_ids=kept,
            finish_reason=request.finish_reason,
            speculation=request.speculation,
        )

    def _mark_injected(self, request: Request) -> None:
        """Every computed token is also the drafter's context, where there is a drafter."""
        if self.config.drafter is not None:
            full = request.num_computed // self.config.block_size
            self.pool.mark_drafter_valid(request.pages[:full])

    def _release(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.stats.requests[request.finish_reason] += 1
        del self._requests[request.request_id]
        if request.slot is None:
            self._waiting.remove(request)
            return
        self.pool.free(request.pages)
        del self._running[request.slot]
        self._free_slots.append(request.slot)


def pages_needed(max_len: int, block_size: int) -> int:
    """Pages for every token a request may feed: all but the last it may emit."""
    return -(-(max_len - 1) // block_size)


def _is_decode(request: Request) -> bool:
    return request.num_computed >= request.prefill_len
