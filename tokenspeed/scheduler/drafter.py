"""What the scheduler asks of a method that proposes draft tokens on the host (speculation), and what it takes of it."""

from __future__ import annotations

from typing import Protocol

from tokenspeed.cache.manager import CacheManager
from tokenspeed.scheduler.request import Sequence


class Drafter(Protocol):
    """Guesses how a sequence goes on; a wrong guess costs time, never correctness."""

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        """At most `max_drafts` (>= 1) ids to follow `token_ids` (prompt and output; not to be kept or changed)."""
        ...


def proposed(drafter: Drafter, cache: CacheManager, sequence: Sequence, start: int, room: int) -> tuple[int, ...]:
    """At most `room` drafts behind the token at `start`, none when there is no memory for them: nobody is preempted for
    a guess."""
    if room < 1:
        return ()
    drafts = tuple(drafter.propose(sequence.token_ids, room)[:room])
    return drafts if not drafts or cache.can_reserve(sequence.table, start + 1 + len(drafts)) else ()
