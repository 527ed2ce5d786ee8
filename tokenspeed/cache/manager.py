"""The cache manager: pages for requests, in integers, one page table a request with one page list a cache group.

Owns the pools and the prefix index. Never sees a tensor, never imports torch, and does not know the scheduler: it
answers "which pages hold this prefix", "give me room for so many tokens" and "these tokens are computed now".

A page is shared only when full, and a full page is never written again, so sharing needs no copy:

    tokens    [0 ........ page_size) [page_size ...... 2 * page_size) [ ...... computed )
    pages     named, may be shared    named, may be shared             private until full
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.cache.pool import PagePool
from tokenspeed.cache.prefix import extend_names, private_root, shared_root
from tokenspeed.cache.spec import GroupSpec

_NEVER = 2**62


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence. Made by `CacheManager.open`; only the manager changes it.

    Fields:
        root: where the sequence's page names start, or None when its pages are never shared.
        pages: per group, pages in position order.
        capacity: tokens the pages have room for.
        commit_at: `commit` has nothing to do while fewer tokens than this are computed.
        names: names of the sequence's first full pages, kept over a preemption so that a prompt is hashed once.
    """

    root: bytes | None
    pages: tuple[list[int], ...]
    capacity: int = 0
    commit_at: int = _NEVER
    names: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What `lookup` found: `pages` per group hold the first `num_tokens` tokens. Valid until the manager changes."""

    num_tokens: int
    pages: tuple[list[int], ...]


class CacheManager:
    """Pages, prefix index and accounting of all cache groups.

    Args:
        groups: what the runner allocated; today all of kind `full` and of one page size.
        enable_prefix_caching: False = pages are found again only under private roots (`open_private`).

    Raises:
        ValueError: no group, a group without pages, a kind without rules here, or page sizes that differ.
    """

    def __init__(self, groups: list[GroupSpec], enable_prefix_caching: bool) -> None:
        if not groups:
            raise ValueError("a cache manager needs at least one cache group")
        for group in groups:
            if group.kind != "full":
                raise ValueError(f"cache group {group.name!r} is of kind {group.kind!r}; only 'full' groups have rules")
            if group.num_pages < 1:
                raise ValueError(f"cache group {group.name!r} has {group.num_pages} pages; at least 1 is needed")
            if group.page_size != groups[0].page_size:
                raise ValueError(f"cache groups have page sizes {sorted({g.page_size for g in groups})}; one is needed")
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self.page_size = groups[0].page_size
        self.capacity_tokens = min(group.num_pages for group in groups) * self.page_size
        self._pools = [PagePool(group.num_pages) for group in groups]
        self._tables: set[PageTable] = set()
        self._num_private_roots = 0
        self._private_names: dict[bytes, set[bytes]] = {}

    # -- page tables ---------------------------------------------------------------------------------------------

    def open(self, cache_salt: str | None) -> PageTable:
        """An empty page table. Requests with different salts never share pages."""
        return self._open(shared_root(cache_salt) if self.enable_prefix_caching else None)

    def open_private_root(self) -> bytes:
        """A root for a set of sequences that share pages only among themselves; end it with `end_private_root`."""
        root = private_root(self._num_private_roots)
        self._num_private_roots += 1
        self._private_names[root] = set()
        return root

    def open_private(self, root: bytes) -> PageTable:
        """An empty page table under a live private root."""
        if root not in self._private_names:
            raise ValueError("this private root has ended or never began")
        return self._open(root)

    def end_private_root(self, root: bytes) -> None:
        """Forget every page named under the root; pages still held stay with their holders."""
        for name in self._private_names.pop(root):
            for pool in self._pools:
                page = pool.index.page(name)
                if page is not None:
                    pool.forget(page)

    def close(self, table: PageTable) -> None:
        """The sequence has ended: release its pages and drop the table."""
        self.release(table)
        self._tables.discard(table)

    def _open(self, root: bytes | None) -> PageTable:
        table = PageTable(root, tuple([] for _ in self._pools))
        table.commit_at = _NEVER if root is None else self.page_size
        self._tables.add(table)
        return table

    # -- the face of architecture.md -----------------------------------------------------------------------------

    def lookup(self, table: PageTable, token_ids: list[int]) -> PrefixHit:
        """The longest computed prefix of `token_ids`, in whole pages, that leaves at least one token to compute.

        Changes nothing but the table's memory of names. `token_ids` only ever grows for one table.
        """
        limit = (len(token_ids) - 1) // self.page_size
        if table.root is None or limit < 1:
            return PrefixHit(0, tuple([] for _ in self._pools))
        extend_names(table.names, table.root, token_ids, limit, self.page_size)
        pages = [pool.index.match(table.names, limit) for pool in self._pools]
        num_pages = min(len(found) for found in pages)
        return PrefixHit(num_pages * self.page_size, tuple(found[:num_pages] for found in pages))

    def reserve(
        self, table: PageTable, num_tokens: int, hit: PrefixHit | None = None, spare_pages: int = 0
    ) -> tuple[list[int], ...] | None:
        """Give the table room for `num_tokens` tokens in all.

        Args:
            hit: pages to share first; only for an empty table, and from a `lookup` with nothing in between.
            spare_pages: refuse when fewer pages than this would be left in a group (free or evictable).

        Returns:
            Per group, the pages appended to the table (hit pages first), or None: no room, and nothing has changed.
        """
        if hit is not None and table.capacity:
            raise ValueError("a prefix hit can only open a page table that is still empty")
        num_pages = -(-num_tokens // self.page_size)
        shared = hit.pages if hit is not None else tuple([] for _ in self._pools)
        missing = [max(0, num_pages - len(held) - len(found)) for held, found in zip(table.pages, shared, strict=True)]
        for pool, num_new, found in zip(self._pools, missing, shared, strict=True):
            if not pool.can_take(num_new, found, spare_pages):
                return None
        appended = []
        for pool, num_new, found, held in zip(self._pools, missing, shared, table.pages, strict=True):
            pool.hold(found)  # before take, which may evict cached pages
            pages = found + pool.take(num_new)
            held.extend(pages)
            appended.append(pages)
        table.capacity = min(len(held) for held in table.pages) * self.page_size
        if hit is not None and table.root is not None:
            table.commit_at = hit.num_tokens + self.page_size
        return tuple(appended)

    def can_reserve(self, table: PageTable, num_tokens: int) -> bool:
        """True when `reserve(table, num_tokens)` would succeed now."""
        num_pages = -(-num_tokens // self.page_size)
        return all(
            pool.can_take(max(0, num_pages - len(held)), [], 0)
            for pool, held in zip(self._pools, table.pages, strict=True)
        )

    def commit(self, table: PageTable, token_ids: list[int], num_tokens: int) -> None:
        """The first `num_tokens` of `token_ids` are computed: name the pages they fill, so that others find them."""
        root = table.root
        if root is None or num_tokens < table.commit_at:
            return
        first, end = table.commit_at // self.page_size - 1, num_tokens // self.page_size
        extend_names(table.names, root, token_ids, end, self.page_size)
        for pool, held in zip(self._pools, table.pages, strict=True):
            for number in range(first, end):
                pool.index.add(table.names[number], held[number])
        private = self._private_names.get(root)
        if private is not None:
            private.update(table.names[first:end])
        table.commit_at = (end + 1) * self.page_size

    def release(self, table: PageTable, forget: bool = False) -> None:
        """Give all pages back. Named pages stay findable until evicted, unless `forget` (their contents are bad)."""
        for pool, held in zip(self._pools, table.pages, strict=True):
            if forget:
                for page in held:
                    pool.forget(page)
            pool.release(held)
            held.clear()
        table.capacity = 0
        table.commit_at = _NEVER if table.root is None else self.page_size

    def flush(self) -> int:
        """Empty the prefix index of pages nobody holds; returns how many pages that freed."""
        return sum(pool.forget_cached() for pool in self._pools)

    # -- accounting ----------------------------------------------------------------------------------------------

    @property
    def num_pages_total(self) -> int:
        return sum(pool.num_pages for pool in self._pools)

    @property
    def num_pages_used(self) -> int:
        """Pages held by live page tables."""
        return sum(pool.num_used for pool in self._pools)

    @property
    def num_pages_cached(self) -> int:
        """Pages only in the prefix index, free to evict."""
        return sum(pool.num_cached for pool in self._pools)

    @property
    def num_pages_free(self) -> int:
        return sum(pool.num_free for pool in self._pools)

    @property
    def num_evictions(self) -> int:
        return sum(pool.num_evictions for pool in self._pools)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold: reference counts equal the holders, no page in two places,
        free + used + cached = total, capacities match the page lists, no private page outlives its root."""
        for number, pool in enumerate(self._pools):
            holders = [0] * pool.num_pages
            for table in self._tables:
                held = table.pages[number]
                assert len(set(held)) == len(held), "a page table holds a page twice"
                for page in held:
                    holders[page] += 1
            pool.check(holders)
        for table in self._tables:
            assert table.capacity == min(len(held) for held in table.pages) * self.page_size, "capacity is wrong"
            assert table.root is not None or not table.names, "a table without root has names"
        if not self.enable_prefix_caching and not self._private_names:
            assert all(not len(pool.index) for pool in self._pools), "pages are named with prefix caching off"
