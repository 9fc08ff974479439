"""Which KV pages are free, held or cached, and what the full ones contain."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Hands out page numbers. Page 0, the null page, is never handed out.

    A page is held, by one or by several, or cached (nobody holds it, and its content may be
    shared), or free. A published page is known by the hash of its content (`actors.prefix`);
    at most one page has a given hash.

    A page is `drafter_valid` once both its target half and its drafter half hold all its tokens:
    only then may a request with speculation take its content over from another.
    """

    def __init__(self, num_pages: int, *, prefix_caching: bool = False) -> None:
        """`num_pages` counts the null page. Without `prefix_caching` no page is ever cached."""
        assert num_pages >= 2
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching
        self.num_evicted = 0
        # Popped from the end: low numbers first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, int] = {}
        # Least recently held first. A plain dict gets slow when it is emptied from the front.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._drafter_valid: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones, which it would evict."""
        return len(self._free) + len(self._cached)

    @property
    def num_usable(self) -> int:
        """Pages that exist for requests, free or not."""
        return self.num_pages - 1

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that `lookup` may still find."""
        return len(self._cached)

    def num_free_beside(self, pages: Iterable[int]) -> int:
        """What `num_free` would be once these different pages from `lookup` were shared."""
        return self.num_free - sum(page in self._cached for page in pages)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, which the caller must have seen to be free.

        Cached pages are evicted only when no page is free, the least recently held first.
        """
        assert 0 <= count <= self.num_free
        pages = []
        for _ in range(count):
            if not self._free:
                self._forget(next(iter(self._cached)))
                self.num_evicted += 1
            page = self._free.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def lookup(self, hashes: Iterable[bytes], *, need_drafter: bool) -> list[int]:
        """The pages of the longest known prefix of `hashes`, which are not taken by this.

        With `need_drafter` the prefix ends before the first page that is not `drafter_valid`.
        """
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None or (need_drafter and page not in self._drafter_valid):
                break
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which are held or cached."""
        for page in pages:
            if page in self._holders:
                self._holders[page] += 1
            else:
                assert page in self._cached, f"page {page} is neither held nor cached"
                del self._cached[page]
                self._holders[page] = 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less for each of these pages of a sequence, in its order.

        A published page that loses its last holder stays cached. Of one call the last page is
        evicted first: a prefix is worth more than what continues it.
        """
        for page in reversed(pages):
            holders = self._holders.get(page, 0)
            assert holders > 0, f"page {page} is not held"
            if holders > 1:
                self._holders[page] = holders - 1
                continue
            del self._holders[page]
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._drafter_valid.discard(page)
                self._free.append(page)

    def publish(self, page: int, page_hash: bytes, *, drafter_valid: bool) -> None:
        """Say that a held page is full of the tokens that `page_hash` names, all of them fed, and
        injected into the drafter if `drafter_valid`. Nothing is said about the latter if not.

        Where another page has this hash, the first of them keeps it, unless only the new one is
        drafter valid.
        """
        if not self.prefix_caching:
            return
        assert page in self._holders, f"page {page} is not held"
        assert self._hash_of.get(page, page_hash) == page_hash, f"page {page} has another hash"
        if drafter_valid:
            self._drafter_valid.add(page)
        known = self._page_of.get(page_hash)
        if known is not None:
            if known in self._drafter_valid or page not in self._drafter_valid:
                return
            self._forget(known)
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash

    def clear(self) -> None:
        """Forget all content, so that `lookup` finds nothing; held pages stay held."""
        for page in list(self._hash_of):
            self._forget(page)

    def drafter_valid(self, page: int) -> bool:
        """Whether the drafter's half of a held or cached page is complete."""
        return page in self._drafter_valid

    def clear_drafter_valid(self) -> None:
        """Every drafter half is lost, as when the drafters were rebuilt."""
        self._drafter_valid.clear()

    def check(self) -> None:
        """Assert that every page but the null page is free, held or cached, and only one of them,
        and that what is known of pages fits together.
        """
        free, held, cached = set(self._free), self._holders.keys(), self._cached.keys()
        assert len(self._free) + len(held) + len(cached) == self.num_usable
        assert free | held | cached == set(range(1, self.num_pages))
        assert all(holders > 0 for holders in self._holders.values())
        assert self._page_of == {page_hash: page for page, page_hash in self._hash_of.items()}
        assert len(self._page_of) == len(self._hash_of)
        assert cached <= self._hash_of.keys() <= held | cached
        assert self._drafter_valid <= held | cached

    def check_idle(self) -> None:
        """Assert that nobody holds a page, besides what `check` asserts."""
        assert not self._holders, f"pages {sorted(self._holders)} are held"
        self.check()

    def _forget(self, page: int) -> None:
        """Take its hash from a published page, which frees it if it is cached."""
        del self._page_of[self._hash_of.pop(page)]
        if page in self._cached:
            del self._cached[page]
            self._drafter_valid.discard(page)
            self._free.append(page)
