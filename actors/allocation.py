"""Who holds slots and KV pages, who waits for them, and who has to give them back."""

from bisect import insort
from itertools import islice

from actors.config import EngineConfig
from actors.page_pool import PagePool
from actors.request import Request
from actors.stats import EngineStats


class Allocation:
    """Gives a request the pages of its next rows, and no more; one that ends early never held the
    others. Requests stand in order: lowest `priority` first, then the one that came first.

    Where pages run out the last of the order is preempted. It waits again in its place of the
    order, and computes its tokens again, but for those whose pages are still cached by then. The
    first of the order is never preempted, and the pool holds all it may ever need, so there is
    always progress.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        self._config = config
        self._stats = stats
        self.waiting: list[Request] = []  # in order
        # By slot. One that has ended or was preempted stays while a row of it is unread.
        self.running: dict[int, Request] = {}
        self.pool, self._free_slots = self._all_free()
        self.has_drafter = config.drafter is not None
        # In this step somebody got no pages: nobody behind takes those that become free for them.
        self._is_short = False
        self._may_admit = True

    def enqueue(self, request: Request) -> None:
        """Let a request wait in its place."""
        insort(self.waiting, request, key=lambda other: other.order)

    def restart(self) -> None:
        """The device has lost everything: nothing is held or cached, and whoever runs waits again,
        to compute all known tokens."""
        running, self.running = self.running, {}
        self.pool, self._free_slots = self._all_free()
        self.has_drafter = self._config.drafter is not None
        for request in running.values():
            request.num_ahead = 0
            if request.finish_reason is None:
                request.restart()
                self.enqueue(request)

    def lose_drafter(self) -> None:
        """The drafter has lost everything, and learns nothing until `regain_drafter`."""
        self.has_drafter = False
        self.pool.clear_drafter_valid()
        for request in self.running.values():
            request.has_context = False

    def regain_drafter(self) -> None:
        """Whoever starts from now on has a drafter, which knows nothing of the others."""
        self.has_drafter = True

    def candidates(self, only: Request | None = None) -> list[Request]:
        """In order, all that a new step may compute: to be run through once, each with `admit` or
        `grow`. With `only` it is that one, once all others have given back what they held."""
        self._is_short, self._may_admit = False, True
        if only is not None:
            for other in self.running.values():
                other.is_preempted |= other is not only and other.finish_reason is None
            self.release()
            return [only] if all(other is only for other in self.running.values()) else []
        running = [request for request in self.running.values() if not request.is_leaving]
        waiting = self.waiting[: len(self._free_slots)]
        return sorted([*running, *waiting], key=lambda request: request.order)

    def admit(self, request: Request, budget: int) -> bool:
        """Start a waiting request: with a slot, with what is cached of its beginning, and
        with pages for up to `budget` (at least 1) tokens behind that. Returns whether it started.

        It may preempt others of less priority for that.
        """
        if not self._may_admit:
            return False
        while True:
            shared = self._lookup(request)
            start = len(shared) * self._config.block_size
            end = min(start + budget, request.prefill_len)
            needed = self._num_pages(end) - len(shared)
            if needed <= self.pool.num_free_beside(shared):
                break
            if not self._make_room(request):
                return False
        self.waiting.remove(request)
        self.pool.share(shared)
        slot = self._free_slots.pop()
        pages = [*shared, *self._take(needed)]
        has_context = self.has_drafter and all(map(self.pool.drafter_valid, shared))
        request.start(slot, pages, start, has_context=has_context)
        self.running[slot] = request
        if request.cached_tokens is None:
            request.cached_tokens = start
            if self._looks_up(request):
                self._stats.prefix_cache_queries += len(request.message.prompt_token_ids)
                self._stats.prefix_cache_hits += start
        return True

    def grow(self, request: Request, end: int) -> bool:
        """Give a running request pages for all positions below `end`, which may preempt others
        behind it. Returns whether it has them."""
        needed = self._num_pages(end) - len(request.pages)
        if needed <= 0:
            return True
        while self._is_short or needed > self.pool.num_free:
            if not self._make_room(request):
                return False
        request.pages += self._take(needed)
        return True

    def publish(self, request: Request) -> None:
        """Let others find the full pages of what a running request has computed."""
        if request.chain is None:
            return
        # Behind the token that ended it a request may have computed tokens that are nobody's.
        full = min(request.num_computed // self._config.block_size, len(request.chain.hashes))
        for i in range(request.num_published, full):
            self.pool.publish(
                request.pages[i],
                request.chain.hashes[i],
                drafter_valid=request.has_context,
            )
        request.num_published = full

    def release(self) -> None:
        """Take slots and pages back from those that ended or were preempted and of which nothing
        is unread."""
        for slot, request in list(self.running.items()):
            if request.is_leaving and request.num_ahead == 0:
                self.pool.free(request.pages)
                del self.running[slot]
                self._free_slots.append(slot)
                if request.finish_reason is None:
                    request.restart()
                    self.enqueue(request)

    def check_idle(self) -> None:
        """Assert that nobody waits and that nothing is held."""
        assert not self.running
        assert not self.waiting
        assert len(self._free_slots) == self._config.num_slots
        self.pool.check_idle()

    def _make_room(self, request: Request) -> bool:
        """Preempt one request for another; where False, there is nothing to wait for but the next
        step."""
        self._may_admit = False
        victims = [other for other in self.running.values() if other.order > request.order]
        # What those that leave still hold comes back as soon as their last row is read.
        is_leaving = any(other.is_leaving for other in self.running.values())
        if self._is_short or is_leaving or not victims:
            self._is_short = True
            return False
        victim = max(victims, key=lambda other: other.order)
        victim.is_preempted = True
        self._stats.preemptions += 1
        self.release()
        return True

    def _all_free(self) -> tuple[PagePool, list[int]]:
        config = self._config
        pool = PagePool(config.num_kv_pages, prefix_caching=config.enable_prefix_caching)
        return pool, list(range(config.num_slots - 1, -1, -1))

    def _take(self, count: int) -> list[int]:
        num_before = self.pool.num_evicted
        pages = self.pool.allocate(count)
        self._stats.evicted_pages += self.pool.num_evicted - num_before
        return pages

    def _lookup(self, request: Request) -> list[int]:
        """The cached pages of a request's beginning; one token at least is left to compute."""
        if not self._looks_up(request):
            return []
        assert request.chain is not None
        most = (request.prefill_len - 1) // self._config.block_size
        return self.pool.lookup(
            islice(request.chain.hashes, most),
            need_drafter=self.has_drafter and request.max_drafts > 0,
        )

    @staticmethod
    def _looks_up(request: Request) -> bool:
        """Logprobs of a prompt need all of it computed."""
        return request.chain is not None and request.message.sampling.prompt_logprobs is None

    def _num_pages(self, end: int) -> int:
        return -(-end // self._config.block_size)
