"""Pages, prefix index and accounting, driven directly and by random operations against a plain model."""

from __future__ import annotations

import random

import pytest

from tokenspeed.cache.manager import CacheManager, PageTable
from tokenspeed.cache.spec import CacheKind, GroupSpec


def manager(num_pages: int = 8, page_size: int = 4, caching: bool = True, num_groups: int = 1) -> CacheManager:
    groups = [GroupSpec(f"g{i}", "full", page_size, 64, num_pages) for i in range(num_groups)]
    return CacheManager(groups, caching)


def computed(cache: CacheManager, token_ids: list[int], salt: str | None = None) -> PageTable:
    """A table whose tokens are all computed, prefix found where there is one."""
    table = cache.open(salt)
    assert cache.reserve(table, len(token_ids), cache.lookup(table, token_ids)) is not None
    cache.commit(table, token_ids, len(token_ids))
    cache.check()
    return table


def found(cache: CacheManager, token_ids: list[int], salt: str | None = None) -> int:
    table = cache.open(salt)
    num_tokens = cache.lookup(table, token_ids).num_tokens
    cache.close(table)
    return num_tokens


def test_lookup_finds_whole_pages_and_leaves_one_token() -> None:
    cache = manager()
    computed(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 4, "all eight are known, but one has to be computed"
    assert found(cache, [1, 2, 3, 4, 5, 0, 7, 8, 9]) == 4
    assert found(cache, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert found(cache, [1]) == 0


def test_equal_pages_after_different_histories_are_different() -> None:
    cache = manager()
    computed(cache, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    computed(cache, [9, 9, 9, 9])
    assert found(cache, [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 4


def test_only_committed_tokens_are_found() -> None:
    cache = manager()
    table = cache.open(None)
    tokens = list(range(12))
    cache.reserve(table, 12)
    for num_tokens, expected in ((3, 0), (4, 4), (7, 4), (12, 8)):
        cache.commit(table, tokens, num_tokens)
        assert found(cache, [*tokens[:11], 99]) == expected


def test_salts_private_roots_and_switched_off_caching_do_not_mix() -> None:
    cache = manager()
    tokens = [1, 2, 3, 4, 5]
    computed(cache, tokens, salt="a")
    assert (found(cache, tokens, "a"), found(cache, tokens, "b"), found(cache, tokens)) == (4, 0, 0)
    off = manager(caching=False)
    computed(off, tokens)
    assert found(off, tokens) == 0
    root = off.open_private_root()
    first, second = off.open_private(root), off.open_private(root)
    off.reserve(first, 5)
    off.commit(first, tokens, 5)
    assert off.lookup(second, tokens).num_tokens == 4
    off.close(first)
    assert off.num_pages_cached == 1
    off.end_private_root(root)
    assert off.num_pages_cached == 0
    off.check()
    with pytest.raises(ValueError, match="private root"):
        off.open_private(root)


def test_shared_pages_are_held_until_the_last_holder_leaves() -> None:
    cache = manager(num_pages=3)
    tokens = [1, 2, 3, 4, 5]
    first = computed(cache, tokens)
    second = computed(cache, tokens)
    assert cache.num_pages_used == 3 and first.pages[0][0] == second.pages[0][0]
    cache.close(first)
    cache.check()
    assert (cache.num_pages_used, cache.num_pages_cached, cache.num_pages_free) == (2, 0, 1)
    cache.close(second)
    assert (cache.num_pages_used, cache.num_pages_cached, cache.num_pages_free) == (0, 1, 2)


def test_the_least_recently_used_page_is_evicted_and_the_end_of_a_history_before_its_beginning() -> None:
    cache = manager(num_pages=4)
    old, new = [1] * 8 + [0], [2] * 4 + [0]
    cache.close(computed(cache, old))
    cache.close(computed(cache, new))
    assert found(cache, old) == 8
    table = cache.open(None)
    cache.reserve(table, 8)  # one free page, one evicted
    assert (found(cache, old), found(cache, new)) == (4, 4)
    cache.close(table)
    cache.close(computed(cache, old[:5]))  # used again: now the younger
    table = cache.open(None)
    cache.reserve(table, 12)
    assert (found(cache, old), found(cache, new)) == (4, 0)
    assert cache.num_evictions == 2


def test_reserve_is_all_or_nothing_and_counts_hits_that_nobody_holds() -> None:
    cache = manager(num_pages=3)
    tokens = list(range(9))
    cache.close(computed(cache, tokens))
    table = cache.open(None)
    hit = cache.lookup(table, [*tokens, 0, 0, 0, 0])
    assert hit.num_tokens == 8
    assert cache.reserve(table, 13, hit) is None, "two hits take two of the three pages; two more are needed"
    cache.check()
    assert cache.num_pages_used == 0 and table.capacity == 0
    assert cache.reserve(table, 12, hit, spare_pages=1) is None
    assert cache.can_reserve(table, 12) and not cache.can_reserve(table, 13)
    pages = cache.reserve(table, 12, hit)
    assert pages is not None and table.pages == pages and table.capacity == 12
    assert cache.reserve(table, 12) == ([],), "room for what is there already costs nothing"


def test_a_hit_opens_only_an_empty_table() -> None:
    cache = manager()
    table = computed(cache, list(range(5)))
    with pytest.raises(ValueError, match="empty"):
        cache.reserve(table, 9, cache.lookup(table, list(range(9))))


def test_forgotten_pages_are_not_found_again() -> None:
    cache = manager()
    tokens = list(range(9))
    first, second = computed(cache, tokens), computed(cache, tokens)
    cache.release(first, forget=True)
    cache.check()
    assert found(cache, tokens) == 0
    cache.close(second)
    cache.check()
    assert cache.num_pages_cached == 0


def test_a_page_computed_twice_is_named_once() -> None:
    cache = manager()
    tokens = list(range(5))
    first, second = cache.open(None), cache.open(None)
    for table in (first, second):
        cache.reserve(table, 5)
    for table in (first, second):
        cache.commit(table, tokens, 5)
    cache.check()
    cache.close(second)
    assert cache.num_pages_cached == 0, "the duplicate is free, the named page still held"
    cache.close(first)
    assert cache.num_pages_cached == 1


def test_flush_leaves_held_pages_alone() -> None:
    cache = manager()
    tokens = list(range(9))
    table = computed(cache, tokens)
    cache.close(computed(cache, [7] * 9))
    assert cache.flush() == 2
    assert found(cache, tokens) == 8
    cache.close(table)
    cache.flush()
    assert cache.num_pages_free == cache.num_pages_total
    cache.check()


def test_groups_share_one_pool() -> None:
    cache = manager(num_pages=7, num_groups=2)
    assert (cache.num_pages_total, cache.capacity_tokens) == (7, 12)
    tokens = list(range(9))
    table = computed(cache, tokens)
    assert [len(pages) for pages in table.pages] == [3, 3] and not set(table.pages[0]) & set(table.pages[1])
    assert cache.reserve(table, 13) is None, "each group wants a page, one is left"
    cache.close(table)
    other = cache.open("x")
    cache.reserve(other, 8)  # three pages are free: one group loses the second page of the history
    assert cache.num_evictions == 1
    assert found(cache, tokens) == 4, "a hit counts only where all groups have it"
    cache.check()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "at least one"),
        ([("full", 4, 0)], "0 pages"),
        ([("state", 4, 4)], "'state'"),
        ([("full", 4, 4), ("full", 8, 4)], r"\[4, 8\]"),
        ([("full", 4, 4), ("full", 4, 5)], r"pages \[4, 5\]"),
        ([("sliding_window", 4, 4)], "window of None"),
    ],
)
def test_groups_without_rules_are_refused(groups: list[tuple[CacheKind, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheManager([GroupSpec("g", kind, size, 1, pages) for kind, size, pages in groups], True)


def test_check_notices_a_lost_and_a_doubled_page() -> None:
    cache = manager()
    table = computed(cache, list(range(5)))
    page = table.pages[0].pop()
    with pytest.raises(AssertionError):
        cache.check()
    table.pages[0].append(page)
    cache.check()
    cache._pool._free.append(page)
    with pytest.raises(AssertionError):
        cache.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_keep_the_invariants_and_never_find_a_wrong_prefix(seed: int) -> None:
    """Every page remembers which history was last computed into it; a hit must hold exactly the asked history."""
    rng = random.Random(seed)
    cache = manager(num_pages=rng.randint(4, 20), page_size=rng.choice([1, 2, 4]), num_groups=rng.choice([1, 2]))
    size = cache.page_size
    contents: dict[tuple[int, int], tuple[str | None, tuple[int, ...]]] = {}
    live: list[tuple[PageTable, list[int], str | None]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.5:
            salt = rng.choice([None, "a"])
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 6 * size))]
            table = cache.open(salt)
            hit = cache.lookup(table, tokens)
            for group, pages in enumerate(hit.pages):
                for number, page in enumerate(pages):
                    assert contents[group, page] == (salt, tuple(tokens[: (number + 1) * size]))
            if cache.reserve(table, len(tokens), hit, spare_pages=rng.randint(0, 2)) is None:
                cache.close(table)
                continue
            live.append((table, tokens, salt))
            done = rng.randint(hit.num_tokens, len(tokens))
            for group, pages in enumerate(table.pages):
                for number in range(hit.num_tokens // size, len(pages)):
                    contents[group, pages[number]] = (salt, tuple(tokens[: (number + 1) * size]))
            cache.commit(table, tokens, done)
        elif live:
            table, tokens, _ = live.pop(rng.randrange(len(live)))
            if action < 0.6:
                cache.release(table, forget=True)
            cache.close(table)
        if action > 0.99:
            cache.flush()
        cache.check()
    for table, _, _ in live:
        cache.close(table)
    cache.check()
    assert cache.num_pages_used == 0
