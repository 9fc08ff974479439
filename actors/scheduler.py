"""Decides what each step computes. Pure: it sees counters and pages, never a tensor or a process.

There are no phases. Every request has `num_computed`; a step feeds some of the tokens it still
lacks, and prefill, chunked prefill and verification differ only in where those tokens are known.
A step may be planned while the one before is unread: requests then count what is ahead of them.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from actors.allocation import Allocation
from actors.buckets import BucketLadder
from actors.choosing import asked, bucket_for, slot_sampling
from actors.config import EngineConfig
from actors.grammar import Grammars, GrammarState
from actors.messages import (
    DecodeRow,
    GenerateRequest,
    Guide,
    PageUpdate,
    PrefillRow,
    StepOutput,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
)
from actors.page_pool import PagePool
from actors.prefix import HashChain
from actors.request import Request
from actors.rows import decode_row, prefill_rows
from actors.speculation import Speculation
from actors.stats import EngineStats

logger = logging.getLogger(__name__)

# Given the ids of the requests that a step would compute, the one to leave out of it, if any.
LeaveOut = Callable[[Sequence[str]], str | None]
# So many crashes without progress make a request run alone, to see whether it is the cause.
_SUSPECT_AFTER = 2


class Scheduler:
    """Continuous batching with chunked prefill: decode rows first, prefill with what is left.

    `actors.allocation` says who may compute. A request that ends keeps its slot and pages until its
    last row was read; that row's tokens are nobody's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        grammars: Grammars | None = None,
        leave_out: LeaveOut | None = None,
    ) -> None:
        """`grammars` follow the guides of requests, which none may have without. `leave_out` is
        asked once a step, for tests: no schedule may change a token."""
        self.config = config
        self.stats = EngineStats()
        self.allocation = Allocation(config, self.stats)
        self.ladder = BucketLadder.for_config(config)
        self.speculation = Speculation(
            config.num_drafts, self.ladder.verify_widths, adaptive=config.adaptive_drafts
        )
        self._grammars = grammars
        self._leave_out = leave_out
        self._requests: dict[str, Request] = {}  # that have not ended
        self._num_added = 0
        self._unread: deque[StepPlan] = deque()
        self._suspects: list[Request] = []  # the first of them runs alone
        self._step = 0

    @property
    def pool(self) -> PagePool:
        return self.allocation.pool

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._unread)

    @property
    def num_unread(self) -> int:
        """Scheduled steps whose output `update` has not seen."""
        return len(self._unread)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request that passed `limits.check_request`, and its guide `Grammars.check`."""
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
            max_drafts=self.config.num_drafts
            if message.max_draft_tokens is None
            else min(message.max_draft_tokens, self.config.num_drafts),
            draft_end=self.config.draft_end,
            arrival=self._num_added,
            chain=HashChain(self.config.block_size, message.cache_salt)
            if self.config.enable_prefix_caching
            else None,
            grammar=self._grammar(sampling.guide),
        )
        self._num_added += 1
        self._requests[request.request_id] = request
        self.allocation.enqueue(request)
        self.stats.prompt_tokens += len(message.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown ids have ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._end(request)
            self.allocation.release()

    def schedule(self) -> StepPlan:
        """The next step; an empty plan where nothing can be computed before an output is read.

        At most one step may be unread. It is planned for as if all its drafts were accepted: a
        request that would then be at its limit waits for the output, as one with a grammar does.
        """
        assert len(self._unread) <= 1, "positions are corrected over one step only"
        decode, chunks, overlapped_drafts = self._choose()
        if not decode and not chunks:
            assert self._unread or not self._requests, "work left, but nothing can be planned"
            return StepPlan(step=self._step)
        max_drafts = self._max_drafts(decode, chunks, overlapped_drafts)
        width = self.ladder.prefill_width([count for _, count in chunks]) if chunks else 0
        rows = [decode_row(request, max_drafts) for request in decode]
        prefill = [
            row
            for request, count in chunks
            for row in prefill_rows(request, count, width, max_drafts)
        ]
        self._step += 1
        plan = self._plan(
            rows, prefill, width, max_drafts, defers_drafts=min(max_drafts, overlapped_drafts) > 0
        )
        for row in plan.rows:
            request = self.allocation.running[row.slot]
            request.num_ahead += row.num_tokens
            request.num_proposed = max_drafts if row.propose else 0
        self._unread.append(plan)
        return plan

    def update(self, output: StepOutput, seconds: float) -> list[TokenChunk]:
        """Advance by what survived the oldest unread step.

        `seconds` is how long the device was at it. Returns one chunk per request that emitted and
        had not ended before.
        """
        plan = self._unread.popleft()
        assert output.step == plan.step
        self._observe_time(plan, seconds)
        self.stats.late_compiles = output.late_compiles
        for row in plan.rows:
            self.allocation.running[row.slot].num_ahead -= row.num_tokens
        for row in plan.prefill:
            self._advance(self.allocation.running[row.slot], row.num_tokens)
        prompt_logprobs = output.prompt_logprobs or ((),) * len(plan.prefill)
        for row, found in zip(plan.prefill, prompt_logprobs, strict=True):
            request = self.allocation.running[row.slot]
            request.prompt_logprobs += asked(found, request.message.sampling.prompt_logprobs)
        chunks = []
        drafts = output.drafts or ((),) * len(output.sampled)
        for row, proposed in zip(plan.emitting, drafts, strict=True):
            self.allocation.running[row.slot].drafts = proposed
        logprobs = output.logprobs or ((),) * len(output.sampled)
        emitted = zip(plan.emitting, output.sampled, output.num_drafts, logprobs, strict=True)
        for row, sampled, num_drafts, found in emitted:
            assert 1 <= len(sampled) <= row.num_tokens, "no row emits none, or more than it fed"
            request = self.allocation.running[row.slot]
            if request.finish_reason is None:
                chunks.append(self._emit(request, row, sampled, num_drafts, found))
        self.allocation.release()
        return chunks

    def restart(self) -> list[TokenChunk]:
        """The device has crashed and has lost everything; whatever runs is computed anew, from what
        was emitted.

        A request that ran through two crashes without progress between them runs alone, and if the
        device crashes again it is given up: returns the last chunks of those, which say `abort`.
        """
        self._unread.clear()
        running = [r for r in self.allocation.running.values() if r.finish_reason is None]
        self.allocation.restart()
        for request in running:
            request.count_crash()
        given_up = [
            r for r in self._suspects[:1] if r in running and r.num_crashes > _SUSPECT_AFTER
        ]
        for request in given_up:
            request.finish_reason = "abort"
            self._end(request, outcome="error")
        requests = sorted(self._requests.values(), key=lambda request: request.order)
        self._suspects = [r for r in requests if r.num_crashes >= _SUSPECT_AFTER]
        return [
            TokenChunk(
                request_id=request.request_id,
                first_index=len(request.output_token_ids),
                token_ids=(),
                finish_reason="abort",
                speculation=request.speculation,
            )
            for request in given_up
        ]

    @property
    def has_drafter(self) -> bool:
        """Whether requests that start now are drafted for."""
        return self.allocation.has_drafter

    def lose_drafter(self) -> None:
        """Dedicated drafters are gone with all they knew: whoever runs goes on plainly."""
        self.stats.drafter_losses += 1
        self.allocation.lose_drafter()

    def regain_drafter(self) -> None:
        """There are others, for the requests that start from now on."""
        self.allocation.regain_drafter()

    def check_idle(self) -> None:
        """Assert that nothing is held while nothing runs, and that no output is unread."""
        assert not self._unread
        assert not self._requests
        self.allocation.check_idle()

    def _choose(self) -> tuple[list[Request], list[tuple[Request, int]], int]:
        """Who decodes in the next step, and who prefills how many tokens; all have their pages. And
        how many drafts per row are verified if that is half a batch, beside drafting for the other
        half; 0 if it is all of it."""
        decode: list[Request] = []
        chunks: list[tuple[Request, int]] = []
        waiting = False
        candidates = self.allocation.candidates(only=next(iter(self._suspects), None))
        widest = self.ladder.verify_widths[-1]
        decoding = [request for request in candidates if request.can_decode]
        budget = self.config.max_num_batched_tokens - widest * len(decoding)
        overlapped_drafts = self._overlapped_drafts(decoding)
        most = -(-len(decoding) // 2) if overlapped_drafts else len(decoding)
        for request in candidates:
            if request.is_leaving:  # preempted since
                continue
            if request.can_decode:
                if request.must_wait or (overlapped_drafts and request.num_ahead):
                    waiting = True
                    continue
                if len(decode) == most:
                    continue
                end = request.next_position + request.most_drafts + 1
                if self.allocation.grow(request, end):
                    decode.append(request)
                continue
            if budget == 0 or (request.slot is None and not self.allocation.admit(request, budget)):
                continue
            count = min(request.prefill_len - request.next_position, budget)
            if count > 0 and self.allocation.grow(request, request.next_position + count):
                chunks.append((request, count))
                budget -= count
        chosen = [*decode, *(request for request, _ in chunks)]
        if waiting and all(request.grammar for request in chosen):
            # They would run as two halves of a batch in turn, in twice as many steps.
            return [], [], 0
        left_out = self._left_out(chosen)
        return (
            [request for request in decode if request is not left_out],
            [(request, count) for request, count in chunks if request is not left_out],
            overlapped_drafts,
        )

    def _overlapped_drafts(self, decoding: list[Request]) -> int:
        """How many drafts per row the batch verifies as two halves in turn; 0 where it is better
        verified as a whole."""
        if self.config.overlap == "never" or len(decoding) < 2:
            return 0
        # With a grammar the next step needs the drafts.
        if any(r.grammar for r in decoding) or not any(r.may_draft for r in decoding):
            return 0
        num_rows = self.ladder.decode_size(len(decoding))
        num_drafts = self.speculation.settled(num_rows)
        pays = self.config.overlap == "always" or self.speculation.overlaps(num_rows, num_drafts)
        return num_drafts if pays else 0

    def _max_drafts(
        self, decode: list[Request], chunks: list[tuple[Request, int]], overlapped_drafts: int
    ) -> int:
        """How many drafts the next step verifies and proposes per row."""
        emitting = [r for r, count in chunks if r.next_position + count == r.prefill_len]
        emitting += decode
        if not any(request.may_draft for request in emitting):
            return 0
        return overlapped_drafts or self.speculation.choose(self.ladder.decode_size(len(emitting)))

    def _grammar(self, guide: Guide | None) -> GrammarState | None:
        if guide is None:
            return None
        assert self._grammars is not None
        return self._grammars.start(guide)

    def _left_out(self, chosen: list[Request]) -> Request | None:
        if self._leave_out is None or not chosen:
            return None
        request_id = self._leave_out([request.request_id for request in chosen])
        # Without it there would be no step to run or to read.
        if request_id is None or (len(chosen) == 1 and not self._unread):
            return None
        return self._requests[request_id]

    def _plan(
        self,
        decode: list[DecodeRow],
        prefill: list[PrefillRow],
        width: int,
        max_drafts: int,
        *,
        defers_drafts: bool,
    ) -> StepPlan:
        """The rows in their bucket; a request's pages and sampling come with its first row."""
        ends = [row.position + row.num_tokens for row in decode]
        ends += [row.start + row.num_tokens for row in prefill]
        pages = -(-max(ends) // self.config.block_size)
        bucket = self.ladder.bucket(
            num_decode=len(decode),
            num_verified=max((row.num_drafts for row in decode), default=0),
            num_drafts=max_drafts,
            num_prefill_rows=len(prefill),
            prefill_width=width,
            num_emitting=len(decode) + sum(row.last for row in prefill),
            context_pages=pages,
        )
        running = self.allocation.running
        return StepPlan(
            step=self._step,
            bucket=bucket_for(bucket, decode, prefill, running),
            decode=tuple(decode),
            prefill=tuple(prefill),
            page_updates=self._page_updates(decode, prefill),
            samplings=tuple(slot_sampling(running[row.slot]) for row in prefill if row.fresh),
            defers_drafts=defers_drafts,
        )

    def _page_updates(
        self, decode: list[DecodeRow], prefill: list[PrefillRow]
    ) -> tuple[PageUpdate, ...]:
        """The pages of these rows' requests that the device does not know."""
        updates = []
        slots = [row.slot for row in decode] + [row.slot for row in prefill]
        for slot in dict.fromkeys(slots):
            request = self.allocation.running[slot]
            first, request.num_sent = request.num_sent, len(request.pages)
            if first < request.num_sent:
                pages = tuple(request.pages[first:])
                updates.append(PageUpdate(slot=slot, first=first, pages=pages))
        return tuple(updates)

    def _emit(
        self,
        request: Request,
        row: DecodeRow | PrefillRow,
        sampled: tuple[int, ...],
        num_drafts: int,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> TokenChunk:
        sampling = request.message.sampling
        first_index = len(request.output_token_ids)
        kept = request.append(sampled)
        if request in self._suspects and request.progressed:
            self._suspects.remove(request)
        if request.grammar is not None:
            request.grammar.commit(kept)
            if request.grammar.failure and request.finish_reason == "stop":
                logger.warning("request %s: %s", request.request_id, request.grammar.failure)
                request.finish_reason = "length"
        self.stats.output_tokens += len(kept)
        if isinstance(row, DecodeRow):
            self._advance(request, len(sampled))
            request.verify_steps += 1
            request.draft_tokens += num_drafts
            request.verified_output += len(kept)
            self.stats.count_verify(num_drafts, len(kept))
            self.speculation.observe_accepted(num_drafts, len(sampled) - 1)
        if request.finish_reason is not None:
            self._end(request)
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if first_index == 0 and sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *request.prompt_logprobs)
        return TokenChunk(
            request_id=request.request_id,
            first_index=first_index,
            token_ids=kept,
            finish_reason=request.finish_reason,
            speculation=request.speculation,
            logprobs=asked(logprobs[: len(kept)], sampling.logprobs),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=(request.cached_tokens or 0) if first_index == 0 else 0,
        )

    def _advance(self, request: Request, num_tokens: int) -> None:
        """Count tokens as computed, which are the drafter's context from then on, where there is
        one."""
        request.num_computed += num_tokens
        self.allocation.publish(request)

    def _observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Count the time of a step that verified as many drafts as it proposed, and no more."""
        bucket = plan.bucket
        assert bucket is not None
        verified = max((row.num_drafts for row in plan.decode), default=0)
        if not plan.prefill and not plan.defers_drafts and verified == bucket.num_drafts:
            self.speculation.observe_time(bucket.decode_rows, verified, seconds)

    def _end(self, request: Request, outcome: str | None = None) -> None:
        """Count a request that has ended; what it holds is taken back once it can be."""
        assert request.finish_reason is not None
        self.stats.requests[outcome or request.finish_reason] += 1
        del self._requests[request.request_id]
        if request in self._suspects:
            self._suspects.remove(request)
        if request.slot is None:
            self.allocation.waiting.remove(request)
