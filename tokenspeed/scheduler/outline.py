"""A plan while it is being made: what has been decided so far, and why no more can be."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.protocol.step import Admission, Row
from tokenspeed.scheduler.invariants import Planned
from tokenspeed.scheduler.request import Sequence


def admission_of(sequence: Sequence) -> Admission:
    """What the runner has to know of a sequence that has just got its slot and first pages."""
    request = sequence.request
    return Admission(
        slot=sequence.slot,
        request_id=request.request_id,
        index=sequence.index,
        token_ids=list(sequence.token_ids),
        prompt_len=sequence.prompt_len,
        pages=tuple(list(pages) for pages in sequence.table.pages),
        sampling=sequence.sampling,
        banned_token_ids=request.banned_token_ids,
        grammar=request.grammar,
    )


@dataclass(slots=True)
class Outline:
    """The next plan.

    Fields:
        budget: tokens left.
        is_blocked: a running sequence waits for pages, so nobody enters.
    """

    budget: int
    is_blocked: bool = False
    admissions: list[Admission] = field(default_factory=list)
    decodes: list[Planned] = field(default_factory=list)
    others: list[Planned] = field(default_factory=list)
    _whole_budget: int = field(init=False)

    def __post_init__(self) -> None:
        self._whole_budget = self.budget

    def add(self, sequence: Sequence, row: Row) -> None:
        """Plan a row."""
        self.budget -= row.num_tokens
        (self.decodes if row.is_decode else self.others).append((sequence, sequence.epoch, row))

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.others)

    def planned(self) -> list[Planned]:
        """All rows, decodes first."""
        return self.decodes + self.others

    @property
    def num_tokens(self) -> int:
        """Of the budget, what is spent."""
        return self._whole_budget - self.budget
