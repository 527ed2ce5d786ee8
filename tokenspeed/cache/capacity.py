"""How many pages sequences need and how many tokens a pool holds, per cache group: arithmetic on `GroupSpec`s alone.

The runner sizes the pool with it, the manager promises with it, the log reports with it.

A sliding group of window w and pages of p tokens, with n tokens computed and a step of c tokens coming:

    [0, gone)                 pages whose last token no query at position >= n sees: gone = (n - w + 1) // p
    [n - w + 1, n + c)        what the step reads and writes: w - 1 + c tokens, wherever a page begins
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tokenspeed.cache.spec import GroupSpec

MAX_POSITIONS = 2**31 - 1
"""Tokens of a sequence that keeps only windows: positions are int32 on devices."""

_GIB = 2**30


def gone_pages(window: int, num_tokens: int, page_size: int) -> int:
    """Pages at the beginning that nobody reads once `num_tokens` tokens are computed: the next query, at position
    `num_tokens`, sees the `window - 1` tokens before it."""
    return max(0, (num_tokens - window + 1) // page_size)


def group_pages(group: GroupSpec, num_tokens: int, step_tokens: int) -> int:
    """Pages that a sequence of `num_tokens` tokens, in steps of at most `step_tokens`, holds at most at once."""
    pages = -(-num_tokens // group.page_size)
    if group.window is None:
        return pages
    touched = group.window - 1 + step_tokens
    return min(pages, 1 + -(-(touched - 1) // group.page_size))  # a run of tokens may begin at the end of a page


def sequence_pages(groups: list[GroupSpec], num_tokens: int, step_tokens: int) -> int:
    """Pages of the pool that one sequence holds at once at most, over all groups."""
    return sum(group_pages(group, num_tokens, step_tokens) for group in groups)


def sequence_capacity(groups: list[GroupSpec], step_tokens: int) -> int:
    """Tokens that one sequence, alone in the pool, can reach when it is computed in steps of at most `step_tokens`."""
    num_pages, page_size = groups[0].num_pages, groups[0].page_size
    if all(group.window is not None for group in groups):
        longest = MAX_POSITIONS // page_size
    else:
        longest = num_pages
    fitting = bisect_right(
        range(1, longest + 1), num_pages, key=lambda n: sequence_pages(groups, n * page_size, step_tokens)
    )
    return fitting * page_size


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """One group's share: `sequence_pages` pages for a sequence of the profile's length while it decodes, `kept_tokens`
    for as many such sequences as the pool holds."""

    name: str
    window: int | None
    sequence_pages: int
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class CacheProfile:
    """What a pool holds when many sequences of `sequence_len` tokens decode.

    Fields:
        context_tokens: tokens of context over all of them; a window's group lets a page go as soon as it may.
        full_layout_tokens: the same if every layer kept all tokens.
        alone_tokens: what one sequence alone can reach, its prompt computed in the largest steps.
    """

    pool_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int
    sequence_len: int
    context_tokens: int
    full_layout_tokens: int
    alone_tokens: int
    groups: tuple[GroupProfile, ...]

    def described(self) -> str:
        """One line for the log."""
        groups = ", ".join(
            f"{group.name} ({'all tokens' if group.window is None else f'window {group.window}'}): "
            f"{group.sequence_pages} pages, of the full pool {group.kept_tokens} tokens"
            for group in self.groups
        )
        compared = ""
        if self.context_tokens != self.full_layout_tokens:
            compared = f", {self.full_layout_tokens} if every layer kept all"
        return (
            f"Cache profile: {self.pool_bytes / _GIB:.2f} GiB, {self.num_pages} pages of {self.page_size} tokens "
            f"({self.page_bytes} bytes) for {len(self.groups)} group{'s' if len(self.groups) > 1 else ''}; "
            f"a sequence of {self.sequence_len} tokens takes {groups}; "
            f"capacity {self.context_tokens} tokens{compared}, {self.alone_tokens} for one sequence alone"
        )


def cache_profile(groups: list[GroupSpec], sequence_len: int, step_tokens: int) -> CacheProfile:
    """What the pool of `groups` holds.

    Args:
        sequence_len: tokens of a sequence (`--max-model-len`).
        step_tokens: tokens of the largest step.
    """
    pool = groups[0]
    pages = -(-sequence_len // pool.page_size)
    # A decoding sequence: one token coming, one in flight whose page cannot have left yet.
    each = [group_pages(group, sequence_len, 2) for group in groups]
    profiles = tuple(
        GroupProfile(group.name, group.window, mine, pool.num_pages * mine // sum(each) * pool.page_size)
        for group, mine in zip(groups, each, strict=True)
    )
    tokens = pool.num_pages * pages * pool.page_size
    return CacheProfile(
        pool_bytes=pool.num_pages * pool.page_bytes,
        page_bytes=pool.page_bytes,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        sequence_len=sequence_len,
        context_tokens=tokens // sum(each),
        full_layout_tokens=tokens // (pages * len(groups)),
        alone_tokens=sequence_capacity(groups, step_tokens),
        groups=profiles,
    )
