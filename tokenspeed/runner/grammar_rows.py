"""Constrained rows on a GPU: masks are made on the host while the step's forward runs on the device.

A grammar must know the token of the step before. That token is sampled on the device; the step is awaited only here,
after the next forward has been launched, so the device keeps working meanwhile. The rows are then sampled again, behind
the forward, under masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.protocol.step import Admission
from tokenspeed.runner.constraints import Constraints, Fault
from tokenspeed.runner.launched_step import Sampled
from tokenspeed.sampling.masks import TokenMasks


class GrammarRows:
    """Which slots have a grammar, and how far each grammar has read."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._slots: set[int] = set()
        self._unread: dict[int, tuple[Sampled, int]] = {}  # and the row among them

    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot. What it had sampled before comes with the admission."""
        self._unread.pop(admission.slot, None)
        self._constraints.admit(admission)
        if self._constraints.holds(admission.slot):
            self._slots.add(admission.slot)
        else:
            self._slots.discard(admission.slot)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Places in `slots` that have a grammar, whether or not it constrains their next token."""
        if self._slots.isdisjoint(slots):
            return []
        return [row for row, slot in enumerate(slots) if slot in self._slots]

    def catch_up(self, slots: Sequence[int]) -> dict[int, Fault]:
        """Tell the grammars of `slots` what was sampled in the step before; slot -> why it cannot go on."""
        errors: dict[int, Fault] = {}
        for slot in slots:
            unread = self._unread.pop(slot, None)
            if unread is None:
                continue
            sampled, row = unread
            error = self._constraints.accept(slot, sampled.wait()[row])
            if error is not None:
                errors[slot] = error
            if not self._constraints.holds(slot):
                self._slots.discard(slot)
        return errors

    def constrained(self, slots: Sequence[int]) -> list[int]:
        """Places in `slots` whose next token something constrains. After `catch_up`."""
        return self._constraints.rows(slots)

    def fill(self, slots: Sequence[int], out: NDArray[np.int32]) -> None:
        """What `slots`, all of them constrained, may sample next: [len(slots), ceil(V / 32)], a bit a token."""
        self._constraints.fill(slots, range(len(slots)), out)

    def masks(self, slots: Sequence[int]) -> TokenMasks | None:
        """The same for any slots, in memory of its own; None when nothing constrains them."""
        constrained = self.constrained(slots)
        return TokenMasks(constrained, self._constraints.fill(slots, constrained)) if constrained else None

    def sampled(self, slots: Sequence[int], sampled: Sampled) -> None:
        """A token has been sampled for each of `slots`."""
        for row in self.rows(slots):
            self._unread[slots[row]] = sampled, row
