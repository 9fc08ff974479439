"""Which KV pages are free, who owns the others, and what they hold."""

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers. Page 0, the null page, is never handed out.

    A page is `drafter_valid` once both its target half and its drafter half hold all its tokens:
    only then may a request with speculation take its content over from another.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page."""
        assert num_pages >= 2
        self.num_pages = num_pages
        # Popped from the end: low numbers first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._owned: set[int] = set()
        self._drafter_valid: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that exist for requests, free or not."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages, which the caller must have seen to be free."""
        assert 0 <= count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give back pages from `allocate`."""
        for page in reversed(pages):
            assert page in self._owned, f"page {page} is not owned"
            self._owned.remove(page)
            self._drafter_valid.discard(page)
            self._free.append(page)

    def drafter_valid(self, page: int) -> bool:
        """Whether the drafter's half of an owned page is complete."""
        return page in self._drafter_valid

    def mark_drafter_valid(self, pages: Iterable[int]) -> None:
        """Say that every token of these owned pages was fed and injected."""
        self._drafter_valid.update(pages)

    def check(self) -> None:
        """Assert that every page but the null page is either free or owned, once."""
        assert len(self._free) == len(set(self._free))
        assert self._owned.isdisjoint(self._free)
        assert self._drafter_valid <= self._owned
        assert self._owned | set(self._free) == set(range(1, self.num_pages))
