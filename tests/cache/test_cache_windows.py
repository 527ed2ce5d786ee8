"""Two cache groups, one of them sliding: what leaves a window, what a hit needs, and random lives against a model."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tokenspeed.cache.manager import CacheManager, PageTable
from tokenspeed.cache.spec import GONE, GroupSpec

FULL, SLIDING = 0, 1


def manager(
    num_pages: int = 32, page_size: int = 4, window: int = 6, caching: bool = True, step_tokens: int = 8
) -> CacheManager:
    groups = [
        GroupSpec("full", "full", page_size, 64, num_pages),
        GroupSpec("sliding", "sliding_window", page_size, 64, num_pages, window),
    ]
    return CacheManager(groups, caching, step_tokens)


def computed(cache: CacheManager, token_ids: list[int], step: int = 4) -> PageTable:
    """A table whose tokens are all computed, in steps, prefix found where there is one."""
    table = cache.open(None)
    hit = cache.lookup(table, token_ids)
    done = hit.num_tokens
    assert cache.reserve(table, min(done + step, len(token_ids)), hit, whole_len=len(token_ids)) is not None
    while done < len(token_ids):
        done = min(done + step, len(token_ids))
        assert cache.reserve(table, done) is not None
        cache.commit(table, token_ids, done)
        cache.check()
    return table


def found(cache: CacheManager, token_ids: list[int]) -> int:
    table = cache.open(None)
    num_tokens = cache.lookup(table, token_ids).num_tokens
    cache.close(table)
    return num_tokens


@pytest.mark.parametrize("caching", [True, False])
def test_pages_go_when_the_next_query_no_longer_sees_them(caching: bool) -> None:
    cache = manager(caching=caching)  # window 6: with n tokens computed, the next query sees [n - 5, n]
    tokens = list(range(20))
    table = cache.open(None)
    cache.reserve(table, 20)
    gone = []
    for num_tokens in range(1, 21):
        cache.commit(table, tokens, num_tokens)
        cache.check()
        gone.append(table.pages[SLIDING].count(GONE))
        assert GONE not in table.pages[FULL]
    assert gone == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4
    assert cache.num_pages_used == 5 + 2 and cache.num_pages_cached == 3 * caching
    cache.close(table)
    cache.check()
    assert cache.num_pages_used == 0


def test_a_sliding_group_reserves_what_the_step_needs_and_a_full_one_the_whole() -> None:
    cache = manager()
    table = cache.open(None)
    pages = cache.reserve(table, 8, whole_len=30)
    assert pages is not None and [len(one) for one in pages] == [8, 2] and table.capacity == 8
    pages = cache.reserve(table, 13)
    assert pages is not None and [len(one) for one in pages] == [0, 2] and table.capacity == 16
    cache.check()


def test_a_hit_needs_the_last_window_of_a_sliding_group_only() -> None:
    cache = manager()
    tokens = list(range(16))
    table = computed(cache, tokens)
    full, sliding = (list(pages) for pages in table.pages)
    cache.close(table)
    other = cache.open(None)
    hit = cache.lookup(other, [*tokens, 99])
    assert hit.num_tokens == 16
    assert hit.pages == (full[:4], [GONE, GONE, *sliding[2:4]]), "position 16 sees [11, 16]"
    assert cache.reserve(other, 18, hit) == ([*full[:4], other.pages[FULL][4]], other.pages[SLIDING])
    cache.check()


def test_pages_that_left_a_window_are_found_by_shorter_histories_and_evicted_first() -> None:
    cache = manager(num_pages=5 + 5, step_tokens=4)
    tokens = list(range(17))
    cache.close(computed(cache, tokens))
    shorter = [*tokens[:9], 99]
    assert (found(cache, tokens), found(cache, shorter)) == (16, 8)
    table = cache.open(None)
    assert cache.reserve(table, 8) is not None  # two pages are free (unnamed tails), two are evicted
    assert cache.num_evictions == 2
    assert (found(cache, tokens), found(cache, shorter)) == (16, 0), "pages 0 and 1 of the window went longest ago"
    assert found(cache, [*tokens[:13], 99]) == 0, "position 12 sees [7, 12]: it needs the second page"


def test_groups_do_not_find_each_others_pages() -> None:
    cache = manager(num_pages=8, page_size=4, window=4)
    tokens = list(range(9))
    table = computed(cache, tokens)
    names = table.names
    index = cache._pool.index
    for name, page in zip(names, table.pages[FULL], strict=False):
        assert index.page(FULL, name) == page and index.group_of(page) == FULL
        assert index.page(SLIDING, name) != page
    cache.close(table)
    for name in names:  # without the sliding group's pages a history is not found, whatever the full group has
        page = index.page(SLIDING, name)
        assert page is not None
        cache._pool.forget(page)
    assert found(cache, tokens) == 0
    cache.check()


def test_what_left_the_window_of_a_failed_sequence_is_not_found_again() -> None:
    cache = manager()
    tokens = list(range(17))
    table = computed(cache, tokens)
    assert table.pages[SLIDING][0] == GONE and found(cache, [*tokens[:5], 99]) == 4
    cache.release(table, forget=True)
    cache.check()
    assert cache.num_pages_cached == 0 and cache.num_pages_free == cache.num_pages_total


def test_two_holders_of_a_window_page_let_it_go_one_by_one() -> None:
    cache = manager()
    tokens = list(range(9))
    first = computed(cache, tokens)
    second = cache.open(None)
    hit = cache.lookup(second, [*tokens, 99])
    assert hit.num_tokens == 8
    cache.reserve(second, 20, hit)
    shared = second.pages[SLIDING][1]
    assert first.pages[SLIDING][1] == shared
    cache.commit(second, [*tokens, *range(99, 110)], 20)
    assert second.pages[SLIDING][1] == GONE and first.pages[SLIDING][1] == shared
    used = cache.num_pages_used
    cache.check()
    cache.close(first)
    cache.check()
    assert cache.num_pages_used < used and found(cache, tokens) == 8


def test_sliding_groups_need_the_size_of_a_step() -> None:
    groups = [GroupSpec("s", "sliding_window", 4, 64, 8, 4)]
    with pytest.raises(ValueError, match="max_step_tokens of at least 1, it is None"):
        CacheManager(groups, True)


def test_check_notices_a_page_that_serves_two_groups_and_a_mark_out_of_place() -> None:
    cache = manager()
    table = computed(cache, list(range(3)))
    own = table.pages[SLIDING][0]
    table.pages[SLIDING][0] = table.pages[FULL][0]
    with pytest.raises(AssertionError, match="two groups"):
        cache.check()
    table.pages[SLIDING][0] = GONE
    with pytest.raises(AssertionError, match="gone marks"):
        cache.check()
    table.pages[SLIDING][0] = own
    cache.check()


def test_with_a_short_window_the_pool_holds_nearly_twice_the_tokens() -> None:
    held = []
    for window in (6, 10_000):
        cache = manager(num_pages=400, window=window, caching=False)
        num_sequences = 0
        while True:
            table = cache.open(None)
            done = 0
            while done < 160 and cache.reserve(table, done + 8, whole_len=160) is not None:
                done += 8
                cache.commit(table, list(range(160)), done)
            if done < 160:
                break
            num_sequences += 1
        held.append(num_sequences)
    assert held == [9, 5], "42 pages a sequence (44 in its last step) or 80"


# -- random operations against a model of the pages' contents ----------------------------------------------------------

Contents = tuple[int, str | None, tuple[int, ...]]  # group, salt, tokens up to and including the position


@dataclass(eq=False)
class Life:
    """A sequence: `planned` tokens have pages and are written, of which the first `done` are committed."""

    table: PageTable
    salt: str | None
    tokens: list[int]
    done: int
    planned: int


class Model:
    """What a device would hold; every step checks what it reads, then writes."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.memory: dict[tuple[int, int], Contents] = {}

    def step(self, life: Life, end: int) -> None:
        size = self.cache.page_size
        for group, spec in enumerate(self.cache.groups):
            held = life.table.pages[group]
            first = 0 if spec.window is None else max(0, life.planned - spec.window + 1)
            for position in range(first, end):
                page = held[position // size]
                assert page != GONE, "a query sees a page that is gone"
                contents = (group, life.salt, tuple(life.tokens[: position + 1]))
                if position >= life.planned:
                    self.memory[page, position % size] = contents
                assert self.memory[page, position % size] == contents, "a query sees another history"
        life.planned = end

    def longest_hit(self, table: PageTable, tokens: list[int]) -> int:
        """The longest usable prefix in pages, by trying all."""
        size, index = self.cache.page_size, self.cache._pool.index
        for num_pages in range((len(tokens) - 1) // size, 0, -1):
            needed = [
                (group, number)
                for group, spec in enumerate(self.cache.groups)
                for number in range(num_pages)
                if spec.window is None or (number + 1) * size - 1 >= num_pages * size - spec.window + 1
            ]
            if all(index.page(group, table.names[number]) is not None for group, number in needed):
                return num_pages
        return 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_never_show_a_query_a_wrong_or_missing_token(seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    page_size, step = rng.choice([1, 2, 3, 4]), rng.randint(1, 9)
    windows = [rng.choice([1, 2, page_size, page_size + 1, 3 * page_size - 1, 11])]
    windows += rng.choice([[], [], [rng.randint(1, 7)]])
    groups = [GroupSpec("full", "full", page_size, 1, 0)][: rng.choice([0, 1, 1, 1])]
    groups += [GroupSpec(f"w{number}", "sliding_window", page_size, 1, 0, w) for number, w in enumerate(windows)]
    rng.shuffle(groups)
    num_pages = rng.randint(6, 40)
    pool = [GroupSpec(g.name, g.kind, page_size, 1, num_pages, g.window) for g in groups]
    cache = CacheManager(pool, caching, step)
    model = Model(cache)
    lives: list[Life] = []
    num_hits = 0
    for _ in range(500):
        action = rng.random()
        if action < 0.25:
            salt = rng.choice([None, "a"])
            table = cache.open(salt)
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 30))]
            hit = cache.lookup(table, tokens)
            if caching:
                assert hit.num_tokens == page_size * model.longest_hit(table, tokens)
            num_hits += hit.num_tokens > 0
            end = min(len(tokens), hit.num_tokens + rng.randint(1, step))
            whole = rng.choice([0, len(tokens)])
            if cache.reserve(table, end, hit, spare_pages=rng.randint(0, 2), whole_len=whole) is None:
                cache.close(table)
            else:
                lives.append(Life(table, salt, tokens, hit.num_tokens, hit.num_tokens))
                model.step(lives[-1], end)
        elif action < 0.9 and lives:
            life = rng.choice(lives)
            before = life.planned
            if rng.random() < 0.2:
                life.tokens.append(rng.randint(0, 1))
            end = min(len(life.tokens), before + rng.randint(1, step))
            if end > before and (end <= life.table.capacity or cache.reserve(life.table, end) is not None):
                model.step(life, end)  # overlapped: planned before the step that stands behind it is committed
            life.done = rng.choice([before, life.planned, life.done])
            cache.commit(life.table, life.tokens, life.done)
        elif lives:
            life = lives.pop(rng.randrange(len(lives)))
            if rng.random() < 0.2:
                cache.release(life.table, forget=True)
            cache.close(life.table)
        if action > 0.99:
            cache.flush()
        cache.check()
    assert num_hits > 0 or not caching
    for life in lives:
        cache.close(life.table)
    cache.check()
    assert cache.num_pages_used == 0
