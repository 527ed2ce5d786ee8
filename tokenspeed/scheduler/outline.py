"""A plan while it is being made: what has been decided so far, and why no more can be."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.protocol.step import Admission, Row, StepPlan
from tokenspeed.scheduler.invariants import Planned
from tokenspeed.scheduler.request import Sequence


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

    def finished(self, step_id: int, planned: list[Planned]) -> StepPlan:
        """The plan of these rows."""
        return StepPlan(step_id, self.admissions, [row for _, _, row in planned], self._whole_budget - self.budget)
