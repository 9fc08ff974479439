from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.page_pool import PagePool
from actors.prefix import page_hashes

HASHES = page_hashes(range(60), 1, "salt")

starts = st.integers(0, len(HASHES) - 1)


class PagePoolMachine(RuleBasedStateMachine):
    """Against lists: what each holder has, what is cached in order of eviction, what is known."""

    @initialize(num_pages=st.integers(2, 40))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, prefix_caching=True)
        self.free = set(range(1, num_pages))
        self.held: list[list[int]] = []
        self.cached: list[int] = []
        self.hashes: dict[int, bytes] = {}
        self.valid: set[int] = set()
        self.num_evicted = 0

    @property
    def out(self) -> set[int]:
        return {page for pages in self.held for page in pages}

    def forget(self, page: int) -> None:
        self.hashes.pop(page, None)
        if page not in self.out:
            self.cached = [other for other in self.cached if other != page]
            self.valid.discard(page)
            self.free.add(page)

    def found(self, hashes: list[bytes], need_drafter: bool) -> list[int]:
        pages: list[int] = []
        for page_hash in hashes:
            known = [page for page, of in self.hashes.items() if of == page_hash]
            if not known or (need_drafter and known[0] not in self.valid):
                break
            pages += known
        return pages

    def draw_held(self, data: st.DataObject) -> list[int]:
        return data.draw(st.sampled_from([pages for pages in self.held if pages]))

    @precondition(lambda self: self.free or self.cached)
    @rule(
        wanted=st.sampled_from([1, 3, 8]),
        first=st.none() | starts,
        drafter_valid=st.booleans(),
    )
    def allocate(self, wanted: int, first: int | None, drafter_valid: bool) -> None:
        count = min(wanted, len(self.free) + len(self.cached))
        evicted = self.cached[: max(0, count - len(self.free))]
        pages = self.pool.allocate(count)
        assert len(pages) == len(set(pages)) == count
        assert self.out.isdisjoint(pages)
        assert self.free.issuperset(pages[: count - len(evicted)])
        assert pages[count - len(evicted) :] == evicted
        self.num_evicted += len(evicted)
        for page in evicted:
            self.forget(page)
        self.free -= set(pages)
        self.held.append(pages)
        if first is not None:
            self.publish_from(first, pages, drafter_valid)

    @precondition(lambda self: self.hashes)
    @rule(data=st.data(), need_drafter=st.booleans())
    def share_what_is_found(self, data: st.DataObject, need_drafter: bool) -> None:
        known = st.sampled_from(list(self.hashes.values()))
        hashes = data.draw(st.lists(known, min_size=1, unique=True))
        hashes += data.draw(st.lists(st.sampled_from(HASHES), max_size=2, unique=True))
        hashes = list(dict.fromkeys(hashes))
        pages = self.pool.lookup(hashes, need_drafter=need_drafter)
        assert pages == self.found(hashes, need_drafter)
        num_free = self.pool.num_free_beside(pages)
        self.pool.share(pages)
        assert self.pool.num_free == num_free
        self.held.append(pages)
        self.cached = [page for page in self.cached if page not in pages]

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free_the_last_of_a_sequence(self, data: st.DataObject) -> None:
        self.free_last(self.draw_held(data), data.draw(st.integers(1, 5)))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end_sequences(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.held)))):
            pages = self.held[0]
            self.free_last(pages, len(pages))
            self.held.remove(pages)

    def free_last(self, pages: list[int], count: int) -> None:
        freed = pages[-count:]
        del pages[-count:]
        self.pool.free(freed)
        for page in reversed(freed):
            if page in self.out:
                continue
            if page in self.hashes:
                self.cached.append(page)
            else:
                self.forget(page)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), first=starts, drafter_valid=st.booleans())
    def publish(self, data: st.DataObject, first: int, drafter_valid: bool) -> None:
        self.publish_from(first, self.draw_held(data), drafter_valid)

    def publish_from(self, first: int, pages: list[int], drafter_valid: bool) -> None:
        # Some of a long sequence stay without a hash.
        for page, page_hash in zip(pages, HASHES[first:], strict=False):
            page_hash = self.hashes.get(page, page_hash)
            self.pool.publish(page, page_hash, drafter_valid=drafter_valid)
            if drafter_valid:
                self.valid.add(page)
            others = self.found([page_hash], need_drafter=False)
            if page in self.valid and others and others[0] not in self.valid:
                self.forget(others.pop())
            if not others:
                self.hashes[page] = page_hash

    @precondition(lambda self: len(self.cached) > 2)
    @rule(is_reset=st.booleans())
    def lose_content(self, is_reset: bool) -> None:
        if is_reset:
            self.pool.clear()
            for page in list(self.hashes):
                self.forget(page)
        else:
            self.pool.clear_drafter_valid()
            self.valid.clear()

    @invariant()
    def the_pool_knows_what_the_lists_know(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.pool.num_usable - len(self.out)
        assert self.pool.num_cached == len(self.cached)
        assert list(self.pool._cached) == self.cached
        assert self.pool.num_evicted == self.num_evicted
        assert {page for page in range(40) if self.pool.drafter_valid(page)} == self.valid
        page_of = {page_hash: page for page, page_hash in self.hashes.items()}
        for page_hash in HASHES:
            known = {page_of[page_hash]} if page_hash in page_of else set()
            assert set(self.pool.lookup([page_hash], need_drafter=False)) == known
            assert set(self.pool.lookup([page_hash], need_drafter=True)) == known & self.valid

    def teardown(self) -> None:
        for pages in getattr(self, "held", []):
            self.pool.free(pages)
        if hasattr(self, "pool"):
            self.pool.check_idle()


PagePoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
TestPagePool = PagePoolMachine.TestCase


def published(pool: PagePool, *hashes: bytes, drafter_valid: bool = True) -> list[int]:
    """Held pages of that content."""
    pages = pool.allocate(len(hashes))
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.publish(page, page_hash, drafter_valid=drafter_valid)
    return pages


def lookup(pool: PagePool, *hashes: bytes, need_drafter: bool = False) -> list[int]:
    return pool.lookup(hashes, need_drafter=need_drafter)


A, B, C, D = HASHES[:4]


def test_all_but_the_null_page_can_be_had() -> None:
    pool = PagePool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_more_than_is_free_is_our_bug() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("pages", [[0], [2], [4], [1, 1]])
def test_freeing_what_is_not_held_is_our_bug(pages: list[int]) -> None:
    pool = PagePool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError, match="is not held"):
        pool.free(pages)


@pytest.mark.parametrize("page", [0, 2, 4])
def test_sharing_what_is_neither_held_nor_cached_is_our_bug(page: int) -> None:
    pool = PagePool(4, prefix_caching=True)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="neither held nor cached"):
        pool.share([page])


@pytest.mark.parametrize("page", [0, 2, 4])
def test_publishing_what_is_not_held_is_our_bug(page: int) -> None:
    pool = PagePool(4, prefix_caching=True)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="is not held"):
        pool.publish(page, A, drafter_valid=True)


def test_a_full_page_never_changes() -> None:
    pool = PagePool(4, prefix_caching=True)
    (page,) = published(pool, A)
    with pytest.raises(AssertionError, match="has another hash"):
        pool.publish(page, B, drafter_valid=True)


def test_without_prefix_caching_nothing_is_found_or_cached() -> None:
    pool = PagePool(4)
    pages = published(pool, A, B)
    assert lookup(pool, A) == []
    pool.free(pages)
    assert pool.num_cached == 0
    assert lookup(pool, A) == []


# ----------------------------------------------------------------------------------- lookup


def test_published_pages_are_found_while_held_and_when_cached() -> None:
    pool = PagePool(6, prefix_caching=True)
    pages = published(pool, A, B)
    assert lookup(pool, A, B) == pages
    pool.free(pages)
    assert (pool.num_cached, pool.num_free) == (2, 5)
    assert lookup(pool, A, B) == pages


def test_lookup_ends_at_the_first_page_that_is_unknown() -> None:
    pool = PagePool(6, prefix_caching=True)
    a, _, d = published(pool, A, B, D)
    assert lookup(pool, A, C, D) == [a]
    assert lookup(pool, C, A) == []
    assert lookup(pool, D) == [d]


def test_lookup_takes_nothing() -> None:
    pool = PagePool(3, prefix_caching=True)
    pool.free(published(pool, A, B))
    lookup(pool, A)
    assert pool.num_free == pool.num_cached == 2
    assert pool.allocate(1) == [2], "the order of eviction is that of freeing"


def test_speculation_needs_the_drafters_half() -> None:
    pool = PagePool(6, prefix_caching=True)
    a, b, c = published(pool, A, B, C, drafter_valid=False)
    pool.publish(a, A, drafter_valid=True)
    pool.publish(c, C, drafter_valid=True)
    assert lookup(pool, A, B, C, need_drafter=True) == [a]
    assert lookup(pool, A, B, C) == [a, b, c]


# ------------------------------------------------------------------------------ share and free


def test_a_shared_page_is_held_until_its_last_holder_is_gone() -> None:
    pool = PagePool(3, prefix_caching=True)
    (page,) = published(pool, A)
    pool.share([page])
    pool.free([page])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.free([page])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    with pytest.raises(AssertionError, match="is not held"):
        pool.free([page])


def test_a_shared_page_is_not_evicted() -> None:
    pool = PagePool(3, prefix_caching=True)
    pages = published(pool, A, B)
    pool.free(pages)
    pool.share(pages[:1])
    assert pool.num_free == 1
    assert pool.allocate(1) == pages[1:]


def test_a_page_that_was_never_published_is_free_at_once() -> None:
    pool = PagePool(4, prefix_caching=True)
    first, other = pool.allocate(2)
    pool.publish(first, A, drafter_valid=True)
    pool.publish(other, A, drafter_valid=True)  # known by the first already
    pool.free([first, other])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert not pool.drafter_valid(other)


def test_what_sharing_would_leave_free_is_known_before() -> None:
    pool = PagePool(6, prefix_caching=True)
    held, cached = published(pool, A, B)
    pool.free([cached])
    assert pool.num_free == 4
    assert pool.num_free_beside([held]) == 4
    assert pool.num_free_beside([held, cached]) == 3


# ----------------------------------------------------------------------------------- eviction


def test_free_pages_go_before_cached_ones() -> None:
    pool = PagePool(5, prefix_caching=True)
    pool.free(published(pool, A, B))
    assert sorted(pool.allocate(2)) == [3, 4]
    assert pool.num_evicted == 0
    assert len(lookup(pool, A, B)) == 2


def test_of_one_sequence_the_last_page_is_evicted_first() -> None:
    pool = PagePool(4, prefix_caching=True)
    a, b, c = published(pool, A, B, C)
    pool.free([a, b, c])
    assert pool.allocate(1) == [c]
    assert lookup(pool, A, B, C) == [a, b]
    assert pool.allocate(2) == [b, a]
    assert pool.num_evicted == 3


def test_the_least_recently_held_page_is_evicted_first() -> None:
    pool = PagePool(4, prefix_caching=True)
    a, b, c = published(pool, A, B, C)
    for page in (a, b, c):
        pool.free([page])
    pool.share([a])
    pool.free([a])
    assert pool.allocate(3) == [b, c, a]


def test_an_evicted_page_is_forgotten_with_its_drafter_half() -> None:
    pool = PagePool(2, prefix_caching=True)
    pool.free(published(pool, A))
    (page,) = pool.allocate(1)
    assert lookup(pool, A) == []
    assert not pool.drafter_valid(page)
    pool.publish(page, B, drafter_valid=False)
    assert lookup(pool, B) == [page]
    assert lookup(pool, B, need_drafter=True) == []


# ------------------------------------------------------------------------------------ publish


@pytest.mark.parametrize("first_valid", [False, True])
@pytest.mark.parametrize("second_valid", [False, True])
def test_of_two_pages_with_one_content_the_first_is_kept_unless_only_the_second_is_valid(
    first_valid: bool, second_valid: bool
) -> None:
    pool = PagePool(4, prefix_caching=True)
    first = published(pool, A, drafter_valid=first_valid)
    second = published(pool, A, drafter_valid=second_valid)
    kept, lost = (second, first) if second_valid and not first_valid else (first, second)
    assert lookup(pool, A) == kept
    pool.free(lost)
    assert pool.num_cached == 0
    pool.free(kept)
    assert pool.num_cached == 1


def test_a_cached_page_that_is_replaced_is_free() -> None:
    pool = PagePool(4, prefix_caching=True)
    old = published(pool, A, drafter_valid=False)
    pool.free(old)
    assert pool.num_cached == 1
    published(pool, A)
    assert (pool.num_cached, pool.num_free) == (0, 2)
    pool.check()


def test_a_page_becomes_valid_when_it_is_published_again() -> None:
    pool = PagePool(4, prefix_caching=True)
    (page,) = published(pool, A, drafter_valid=False)
    pool.publish(page, A, drafter_valid=True)
    assert lookup(pool, A, need_drafter=True) == [page]
    pool.publish(page, A, drafter_valid=False)
    assert lookup(pool, A, need_drafter=True) == [page], "nothing was said against it"


def test_a_page_that_was_not_kept_may_become_valid_and_replace_the_other() -> None:
    pool = PagePool(4, prefix_caching=True)
    published(pool, A, drafter_valid=False)
    (second,) = published(pool, A, drafter_valid=False)
    pool.publish(second, A, drafter_valid=True)
    assert lookup(pool, A) == [second]


# ------------------------------------------------------------------------------------- clear


def test_rebuilt_drafters_know_no_page() -> None:
    pool = PagePool(4, prefix_caching=True)
    held, cached = published(pool, A, B)
    pool.free([cached])
    pool.clear_drafter_valid()
    assert lookup(pool, A, B) == [held, cached]
    assert lookup(pool, A, need_drafter=True) == lookup(pool, B, need_drafter=True) == []
    pool.publish(held, A, drafter_valid=True)
    assert lookup(pool, A, need_drafter=True) == [held]


def test_clearing_forgets_content_and_keeps_holders() -> None:
    pool = PagePool(4, prefix_caching=True)
    held, cached = published(pool, A, B)
    pool.free([cached])
    pool.clear()
    assert lookup(pool, A) == lookup(pool, B) == []
    assert (pool.num_free, pool.num_cached, pool.num_evicted) == (2, 0, 0)
    pool.publish(held, C, drafter_valid=True)
    assert lookup(pool, C) == [held]
    pool.free([held])
    assert (pool.num_free, pool.num_cached) == (3, 1)


# ------------------------------------------------------------------------------------- checks

PLANTED: dict[str, Callable[[PagePool], object]] = {
    "a lost page": lambda pool: pool._free.pop(),
    "a page free twice": lambda pool: pool._free.append(pool._free[0]),
    "the null page free": lambda pool: pool._free.append(0),
    "a free page held": lambda pool: pool._holders.update({pool._free[0]: 1}),
    "a cached page free": lambda pool: pool._free.append(next(iter(pool._cached))),
    "a held page without holders": lambda pool: pool._holders.update({1: 0}),
    "a hash that leads nowhere": lambda pool: pool._page_of.update({D: 1}),
    "a page whose hash is not known": lambda pool: pool._page_of.pop(A),
    "two pages with one hash": lambda pool: pool._hash_of.update({1: B}),
    "a cached page without hash": lambda pool: pool._page_of.pop(pool._hash_of.pop(2)),
    "a free page with a hash": lambda pool: (
        pool._hash_of.update({pool._free[0]: D}),
        pool._page_of.update({D: pool._free[0]}),
    ),
    "a free page that is drafter valid": lambda pool: pool._drafter_valid.add(pool._free[0]),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_check_finds(plant: Callable[[PagePool], object]) -> None:
    pool = PagePool(6, prefix_caching=True)
    held, cached = published(pool, A, B)
    assert (held, cached) == (1, 2)
    pool.free([cached])
    pool.check()
    plant(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_an_idle_pool_holds_nothing_but_may_cache() -> None:
    pool = PagePool(4, prefix_caching=True)
    (page,) = published(pool, A)
    pool.check()
    with pytest.raises(AssertionError, match=r"pages \[1\] are held"):
        pool.check_idle()
    pool.free([page])
    pool.check_idle()
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check_idle()
