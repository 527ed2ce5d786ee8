"""What the scheduler asks of a method that proposes draft tokens on the host (speculation)."""

from __future__ import annotations

from typing import Protocol


class Drafter(Protocol):
    """Guesses how a sequence goes on; a wrong guess costs time, never correctness."""

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        """At most `max_drafts` (>= 1) ids to follow `token_ids` (prompt and output; not to be kept or changed)."""
        ...
