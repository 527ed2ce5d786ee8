"""The one page pool of all cache groups: who is free, who is held how often, who may be evicted.

Every page is in exactly one of three places:

    free     no holder, no name: its contents mean nothing
    used     held by one or more page tables (reference count >= 1), named or not
    cached   no holder but still named in the prefix index: a later request may find it; evicted oldest first

Knows page numbers only; what the pages hold is the runner's business, and which group holds a page the manager's.
"""

from __future__ import annotations

from collections import OrderedDict

from tokenspeed.cache.prefix import PrefixIndex


class PagePool:
    """Pages [0, num_pages) and the prefix index over them."""

    def __init__(self, num_pages: int, num_groups: int = 1) -> None:
        self.num_pages = num_pages
        self.index = PrefixIndex(num_groups)
        self.num_evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))  # a stack, so that low page numbers go first
        self._num_holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    def can_take(self, num_new: int, shared: list[int], spare: int) -> bool:
        """True when `num_new` pages can be taken beside holding `shared` ones and `spare` pages would still be left."""
        holders = self._num_holders
        revived = sum(1 for page in shared if not holders[page])
        return len(self._free) + len(self._cached) - revived >= num_new + spare

    def take(self, num_new: int) -> list[int]:
        """`num_new` pages with one holder each; evicts cached pages, oldest first, when the free ones run out.

        The caller has asked `can_take`.
        """
        pages: list[int] = []
        for _ in range(num_new):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self.index.remove(page)
                self.num_evictions += 1
            self._num_holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: list[int]) -> None:
        """One more holder for each of these used or cached pages."""
        for page in pages:
            if self._num_holders[page] == 0:
                del self._cached[page]
            self._num_holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less for each. Walks backwards, so that of one history the last page is evicted first and the
        widely shared first pages last."""
        for page in reversed(pages):
            left = self._num_holders[page] - 1
            self._num_holders[page] = left
            if left:
                continue
            if page in self.index:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self, page: int) -> None:
        """Take a page's name away; it can no longer be found, and is free once nobody holds it."""
        self.index.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def forget_cached(self) -> int:
        """Free every cached page; returns how many."""
        pages = list(self._cached)
        for page in pages:
            self.forget(page)
        return len(pages)

    def check(self, num_holders: list[int]) -> None:
        """Raise AssertionError unless the three places partition the pages and `num_holders` (counted by the caller
        from the live page tables) equals the reference counts."""
        self.index.check()
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, f"pages both free and cached: {sorted(free & cached)}"
        assert num_holders == self._num_holders, "reference counts differ from the holders"
        for page in range(self.num_pages):
            idle = page in free or page in cached
            assert idle == (num_holders[page] == 0), f"page {page} has {num_holders[page]} holders, idle is {idle}"
            assert page not in free or page not in self.index, f"page {page} is free but named"
            assert page not in cached or page in self.index, f"page {page} is cached but has no name"
        assert self.num_free + self.num_cached + self.num_used == self.num_pages
