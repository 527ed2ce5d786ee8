"""The cache manager: pages for requests, in integers, one page table a request with one page list a cache group.

Owns the pool and the prefix index. Never sees a tensor, never imports torch, and does not know the scheduler: it
answers "which pages hold this prefix", "give me room for so many tokens" and "these tokens are computed now".

A page is shared only when full, and a full page is never written again, so sharing needs no copy:

    tokens    [0 ........ page_size) [page_size ...... 2 * page_size) [ ...... computed )
    pages     named, may be shared    named, may be shared             private until full

A sliding group lets the pages go that have left the window; its list keeps `GONE` in their places:

    tokens    [0 ............ gone * page_size) [ ... computed - window + 1 ...... computed )
    pages     GONE, perhaps still in the index   held: the next query sees a part, or all

Pages go when tokens are known to be computed (`commit`). A step still running reads only what later queries see too,
and a page handed out afterwards is written by a later step, so the order of the steps protects both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed.cache.capacity import gone_pages, sequence_capacity
from tokenspeed.cache.pool import PagePool
from tokenspeed.cache.prefix import extend_names, private_root, shared_root
from tokenspeed.cache.spec import GONE, GroupSpec

_NEVER = 2**62


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence. Made by `CacheManager.open`; only the manager changes it.

    Fields:
        root: where the sequence's page names start, or None when its pages are never shared.
        pages: per group, pages in position order; the first `num_gone` of a group are `GONE`.
        capacity: tokens that all groups have room for.
        commit_at: `commit` has nothing to do while fewer tokens than this are computed.
        num_named: full pages that have been named, found ones included.
        names: names of the sequence's first full pages, kept over a preemption so that a prompt is hashed once.
    """

    root: bytes | None
    pages: tuple[list[int], ...]
    num_gone: list[int]
    capacity: int = 0
    commit_at: int = _NEVER
    num_named: int = 0
    names: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What `lookup` found: `pages` per group hold the first `num_tokens` tokens, `GONE` where a sliding group need not.
    Valid until the manager changes."""

    num_tokens: int
    pages: tuple[list[int], ...]


class CacheManager:
    """Pages, prefix index and accounting of all cache groups.

    Args:
        groups: what the runner allocated: kinds `full` and `sliding_window`, one pool of equal pages.
        enable_prefix_caching: False = pages are found again only under private roots (`open_private`).
        max_step_tokens: tokens of one sequence in a step at most; needed for sliding groups, which have to hold a
            step's tokens beside the window.

    Fields:
        capacity_tokens: what one sequence can reach when it is alone.

    Raises:
        ValueError: no group, a group without pages, a kind or window without rules here, groups that do not share one
            pool, or sliding groups without `max_step_tokens`.
    """

    def __init__(
        self, groups: list[GroupSpec], enable_prefix_caching: bool, max_step_tokens: int | None = None
    ) -> None:
        _check_groups(groups)
        self._sliding = [(number, group.window) for number, group in enumerate(groups) if group.window is not None]
        self._full = [number for number, group in enumerate(groups) if group.window is None]
        if self._sliding and (max_step_tokens is None or max_step_tokens < 1):
            raise ValueError(f"sliding cache groups need max_step_tokens of at least 1, it is {max_step_tokens}")
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self.page_size = groups[0].page_size
        self.capacity_tokens = sequence_capacity(groups, max_step_tokens or 1)
        self._pool = PagePool(groups[0].num_pages, len(groups))
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
        names = list(self._private_names.pop(root))
        for group in range(len(self.groups)):
            self._forget_names(group, names)

    def close(self, table: PageTable) -> None:
        """The sequence has ended: release its pages and drop the table."""
        self.release(table)
        self._tables.discard(table)

    def _open(self, root: bytes | None) -> PageTable:
        table = PageTable(root, self._no_pages(), [0] * len(self.groups))
        table.commit_at = self._next_commit(table)
        self._tables.add(table)
        return table

    def _no_pages(self) -> tuple[list[int], ...]:
        return tuple([] for _ in self.groups)

    # -- the face of architecture.md -----------------------------------------------------------------------------

    def lookup(self, table: PageTable, token_ids: list[int]) -> PrefixHit:
        """The longest computed prefix of `token_ids`, in whole pages, that leaves at least one token to compute.

        A prefix counts when every full group has all its pages and every sliding group those that its next token sees.
        Changes nothing but the table's memory of names. `token_ids` only ever grows for one table.
        """
        limit = (len(token_ids) - 1) // self.page_size
        if table.root is None or limit < 1:
            return PrefixHit(0, self._no_pages())
        extend_names(table.names, table.root, token_ids, limit, self.page_size)
        index, names = self._pool.index, table.names
        for group in self._full:
            limit = index.match(group, names, limit)
        num_pages = self._longest_in_windows(names, limit)
        pages = []
        for group in range(len(self.groups)):
            gone = self._num_gone(group, num_pages * self.page_size)
            pages.append([GONE] * gone + index.pages(group, names[gone:num_pages]))
        return PrefixHit(num_pages * self.page_size, tuple(pages))

    def _longest_in_windows(self, names: list[bytes], limit: int) -> int:
        """The largest number of pages, at most `limit`, whose last window every sliding group knows."""
        num_pages, index = limit, self._pool.index
        while True:
            longest = num_pages
            for group, window in self._sliding:
                first = gone_pages(window, longest * self.page_size, self.page_size)
                unknown = index.last_unknown(group, names, first, longest)
                if unknown is not None:
                    longest = unknown  # windows of all lengths between contain this page too
            if longest == num_pages:
                return num_pages
            num_pages = longest

    def _num_gone(self, group: int, num_tokens: int) -> int:
        window = self.groups[group].window
        return 0 if window is None else gone_pages(window, num_tokens, self.page_size)

    def reserve(
        self,
        table: PageTable,
        num_tokens: int,
        hit: PrefixHit | None = None,
        spare_pages: int = 0,
        whole_len: int = 0,
    ) -> tuple[list[int], ...] | None:
        """Give the table room for `num_tokens` tokens in all.

        Args:
            hit: pages to share first; only for an empty table, and from a `lookup` with nothing in between.
            spare_pages: refuse when fewer pages than this would be left in the pool (free or evictable).
            whole_len: full groups get room for this many tokens if that is more: what they take they keep, so it is
                better refused now than in the middle of a prompt.

        Returns:
            Per group, the pages appended to the table (hit pages first), or None: no room, and nothing has changed.
        """
        if hit is not None and table.capacity:
            raise ValueError("a prefix hit can only open a page table that is still empty")
        shared = hit.pages if hit is not None else self._no_pages()
        missing = self._missing(table, num_tokens, whole_len, shared)
        found = [page for pages in shared for page in pages if page != GONE]
        pool = self._pool
        if not pool.can_take(sum(missing), found, spare_pages):
            return None
        pool.hold(found)  # before take, which may evict cached pages
        appended = []
        for held, pages, num_new in zip(table.pages, shared, missing, strict=True):
            new = pages + pool.take(num_new)
            held.extend(new)
            appended.append(new)
        table.capacity = min(map(len, table.pages)) * self.page_size
        if hit is not None:
            table.num_named = hit.num_tokens // self.page_size
            table.num_gone = [self._num_gone(group, hit.num_tokens) for group in range(len(self.groups))]
            table.commit_at = self._next_commit(table)
        return tuple(appended)

    def can_reserve(self, table: PageTable, num_tokens: int) -> bool:
        """True when `reserve(table, num_tokens)` would succeed now."""
        return self._pool.can_take(sum(self._missing(table, num_tokens, 0, self._no_pages())), [], 0)

    def has_pages(self, num_pages: int) -> bool:
        """True when so many pages are free or evictable."""
        return self._pool.can_take(num_pages, [], 0)

    def _missing(self, table: PageTable, num_tokens: int, whole_len: int, shared: Sequence[Sequence[int]]) -> list[int]:
        """Pages that each group lacks beside those held and `shared`."""
        missing = []
        for group, held, found in zip(self.groups, table.pages, shared, strict=True):
            wanted = max(num_tokens, whole_len) if group.window is None else num_tokens
            missing.append(max(0, -(-wanted // self.page_size) - len(held) - len(found)))
        return missing

    def commit(self, table: PageTable, token_ids: list[int], num_tokens: int) -> None:
        """The first `num_tokens` of `token_ids` are computed: name the pages they fill, so that others find them, and
        let go what has left the windows."""
        if num_tokens < table.commit_at:
            return
        root, end = table.root, num_tokens // self.page_size
        if root is not None and end > table.num_named:
            self._name(table, root, token_ids, end)
        for group, window in self._sliding:
            first, gone = table.num_gone[group], gone_pages(window, num_tokens, self.page_size)
            if gone > first:
                held = table.pages[group]
                self._pool.release(held[first:gone])
                held[first:gone] = [GONE] * (gone - first)
                table.num_gone[group] = gone
        table.commit_at = self._next_commit(table)

    def _name(self, table: PageTable, root: bytes, token_ids: list[int], end: int) -> None:
        """Name the pages up to number `end`."""
        first = table.num_named
        extend_names(table.names, root, token_ids, end, self.page_size)
        for group, held in enumerate(table.pages):
            for number in range(first, end):
                self._pool.index.add(group, table.names[number], held[number])
        private = self._private_names.get(root)
        if private is not None:
            private.update(table.names[first:end])
        table.num_named = end

    def _next_commit(self, table: PageTable) -> int:
        """Tokens at which the next page is full, or the next one leaves a window."""
        at = _NEVER if table.root is None else (table.num_named + 1) * self.page_size
        for group, window in self._sliding:
            at = min(at, (table.num_gone[group] + 1) * self.page_size + window - 1)
        return at

    def release(self, table: PageTable, forget: bool = False) -> None:
        """Give all pages back. Named pages stay findable until evicted, unless `forget` (their contents are bad, also
        of those that have left a window)."""
        pool = self._pool
        for group, held in enumerate(table.pages):
            gone = table.num_gone[group]
            pages = held[gone:]
            if forget:
                for page in pages:
                    pool.forget(page)
                self._forget_names(group, table.names[: min(gone, table.num_named)])
            pool.release(pages)
            held.clear()
            table.num_gone[group] = 0
        table.capacity = table.num_named = 0
        table.commit_at = self._next_commit(table)

    def _forget_names(self, group: int, names: list[bytes]) -> None:
        for name in names:
            page = self._pool.index.page(group, name)
            if page is not None:
                self._pool.forget(page)

    def flush(self) -> int:
        """Empty the prefix index of pages nobody holds; returns how many pages that freed."""
        return self._pool.forget_cached()

    # -- accounting ----------------------------------------------------------------------------------------------

    @property
    def num_pages_total(self) -> int:
        return self._pool.num_pages

    @property
    def num_pages_used(self) -> int:
        """Pages held by live page tables."""
        return self._pool.num_used

    @property
    def num_pages_cached(self) -> int:
        """Pages only in the prefix index, free to evict."""
        return self._pool.num_cached

    @property
    def num_pages_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        return self._pool.num_evictions

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold: reference counts equal the holders, no page in two places
        or two groups, free + used + cached = total, capacities match the page lists, only what may be gone is gone, no
        private page outlives its root."""
        pool = self._pool
        holders = [0] * pool.num_pages
        group_of = [pool.index.group_of(page) for page in range(pool.num_pages)]
        for table in self._tables:
            self._check_table(table)
            for group, held in enumerate(table.pages):
                for page in held[table.num_gone[group] :]:
                    holders[page] += 1
                    assert group_of[page] in (None, group), f"page {page} serves two groups"
                    group_of[page] = group
        pool.check(holders)
        if not self.enable_prefix_caching and not self._private_names:
            assert not len(pool.index), "pages are named with prefix caching off"

    def _check_table(self, table: PageTable) -> None:
        assert table.capacity == min(map(len, table.pages)) * self.page_size, "capacity is wrong"
        assert table.root is not None or not (table.names or table.num_named), "a table without root has names"
        assert table.num_named <= len(table.names), "pages are named by nothing"
        assert table.commit_at == self._next_commit(table), "the next commit is missed"
        for group, held in enumerate(table.pages):
            gone = table.num_gone[group]
            assert held[:gone] == [GONE] * gone and GONE not in held[gone:], "gone marks are not the first entries"
            assert len(set(held[gone:])) == len(held) - gone, "a page table holds a page twice"
            assert not gone or self.groups[group].window is not None, "a full group has lost a page"
            assert table.root is None or gone <= table.num_named, "a page has left a window before it was full"


def _check_groups(groups: list[GroupSpec]) -> None:
    """Raise ValueError unless there are rules for all groups and they share one pool."""
    if not groups:
        raise ValueError("a cache manager needs at least one cache group")
    for group in groups:
        if group.kind not in ("full", "sliding_window"):
            raise ValueError(
                f"cache group {group.name!r} is of kind {group.kind!r}; only 'full' and 'sliding_window' have rules"
            )
        if (group.kind == "sliding_window") != (group.window is not None and group.window >= 1):
            raise ValueError(f"cache group {group.name!r} is of kind {group.kind!r} with a window of {group.window}")
        if group.num_pages < 1:
            raise ValueError(f"cache group {group.name!r} has {group.num_pages} pages; at least 1 is needed")
    for what, values in (
        ("page sizes", {group.page_size for group in groups}),
        ("page bytes", {group.page_bytes for group in groups}),
        ("numbers of pages", {group.num_pages for group in groups}),
    ):
        if len(values) > 1:
            raise ValueError(f"cache groups have {what} {sorted(values)}; they share one pool and need one")
