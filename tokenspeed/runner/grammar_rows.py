"""Constrained rows on a GPU: masks are made on the host while the step's forward runs on the device.

A grammar must know the token of the step before. That token is sampled on the device; its copy to the host is awaited
only here, after the next forward has been launched, so the device keeps working meanwhile. The rows are then sampled
again, behind the forward, from masked logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed.protocol.step import Admission
from tokenspeed.runner.constraints import Constraints, Fault
from tokenspeed.sampling.masks import TokenMasks


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A step's sampled tokens on their way to the host, and one row of them."""

    copied: torch.cuda.Event
    token_ids: torch.Tensor
    row: int


class GrammarRows:
    """Which slots have a grammar, and how far each grammar has read."""

    def __init__(self, constraints: Constraints, device: torch.device) -> None:
        self._constraints = constraints
        self._device = device
        self._slots: set[int] = set()
        self._unread: dict[int, _OnItsWay] = {}

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
        if not self._slots:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._slots]

    def catch_up(self, slots: Sequence[int]) -> dict[int, Fault]:
        """Tell the grammars of `slots` what was sampled in the step before; slot -> why it cannot go on."""
        errors: dict[int, Fault] = {}
        for slot in slots:
            unread = self._unread.pop(slot, None)
            if unread is None:
                continue
            unread.copied.synchronize()
            error = self._constraints.accept(slot, int(unread.token_ids[unread.row]))
            if error is not None:
                errors[slot] = error
            if not self._constraints.holds(slot):
                self._slots.discard(slot)
        return errors

    def masks(self, slots: Sequence[int]) -> TokenMasks | None:
        """What `slots` may sample next; None when nothing constrains them. After `catch_up`."""
        constrained = self._constraints.rows(slots)
        return TokenMasks(constrained, self._constraints.fill(slots, constrained)) if constrained else None

    def sampled(self, slots: Sequence[int], token_ids: torch.Tensor) -> None:
        """Tokens have been sampled for `slots`, [len(slots)] on the device; starts their copy."""
        mine = self.rows(slots)
        if not mine:
            return
        host = torch.empty(len(slots), dtype=token_ids.dtype, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device))
        for row in mine:
            self._unread[slots[row]] = _OnItsWay(copied, host, row)
