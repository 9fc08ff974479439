import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.page_pool import PagePool


class PagePoolMachine(RuleBasedStateMachine):
    """Against a plain list of the allocations that are out."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: list[list[int]] = []
        self.marked: set[int] = set()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        pages = self.pool.allocate(count)
        assert len(pages) == count
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_one_allocation(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def free_one_page(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.held if pages]))
        self.pool.free([pages.pop(data.draw(st.integers(0, len(pages) - 1)))])

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.held if pages]))
        count = data.draw(st.integers(0, len(pages)))
        self.pool.mark_drafter_valid(pages[:count])
        self.marked.update(pages[:count])

    @invariant()
    def a_mark_lasts_until_the_page_is_freed(self) -> None:
        out = {page for pages in self.held for page in pages}
        self.marked &= out
        valid = {page for page in range(self.pool.num_pages) if self.pool.drafter_valid(page)}
        assert valid == self.marked

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        out = [page for pages in self.held for page in pages]
        assert len(out) == len(set(out))
        assert all(1 <= page < self.pool.num_pages for page in out)
        assert self.pool.num_free == self.pool.num_usable - len(out)
        self.pool.check()


PagePoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPagePool = PagePoolMachine.TestCase


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


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(4)
    pool.allocate(1)
    pool._holders.clear()
    with pytest.raises(AssertionError):
        pool.check()
