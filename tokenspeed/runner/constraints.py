"""The grammars of the sequences in slots: which rows are constrained, what each may sample, what it has sampled.

One thread at a time. No torch: masks are filled on the host, while a device may be computing. A sequence whose grammar
takes too long ends, so that it does not hold up its neighbours (measured with ambiguous grammars: the cost of a token
grows with the output, slowly enough that no single one goes far beyond the rest of the credit).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import MaskRow, Matcher
from tokenspeed.protocol.grammar import CANNOT_FOLLOW
from tokenspeed.protocol.step import Admission

CREDIT_S = 0.25
"""CPU seconds a sequence may spend at once on mask and acceptance; usual is 0.0001 a token."""

EARNED_S = 0.003
"""What each token gives back of it."""


@dataclass(slots=True)
class _Slot:
    """One constrained sequence.

    Fields:
        marker: what has to be sampled before the constraint starts; empty once it has.
        before: the mask until then, [ceil(V / 32)]; None: anything may come.
        tail: the last sampled tokens, while there is a marker to find.
        error: why the sequence cannot go on; set from the start where there is no matcher.
        credit_s: CPU seconds left to spend.
    """

    matcher: Matcher | None
    marker: tuple[int, ...]
    before: NDArray[np.int32] | None = None
    tail: list[int] = field(default_factory=list)
    error: str | None = None
    credit_s: float = CREDIT_S

    def accept(self, token_id: int) -> None:
        if self.matcher is None or self.error is not None or self.matcher.is_terminated:
            return  # a step that was planned before the end was known: dropped by the scheduler
        if self.marker:
            self.tail = [*self.tail, token_id][-len(self.marker) :]
            if tuple(self.tail) == self.marker:
                self.marker = ()
        else:
            self._follow(self.matcher, token_id)

    def fill(self, row: MaskRow) -> bool:
        """See `Matcher.fill`. What the library cannot do costs this sequence alone, after the step."""
        assert self.matcher is not None
        try:
            return self.matcher.fill(row)
        except Exception as error:
            self.error = f"{CANNOT_FOLLOW}{type(error).__name__}: {error}"[:500]
            return False

    def _follow(self, matcher: Matcher, token_id: int) -> None:
        try:
            is_allowed = matcher.accept(token_id)
        except Exception as error:  # whatever the library raises is about this grammar
            self.error = f"{CANNOT_FOLLOW}{type(error).__name__}: {error}"[:500]
            return
        if matcher.failure is not None:
            self.error = CANNOT_FOLLOW + matcher.failure
        elif not is_allowed:
            self.error = f"the token {token_id} was sampled although the grammar does not allow it"


class Constraints:
    """Constraints of `num_slots` slots.

    Args:
        compiler: holds the compiled grammars; None when constrained decoding is off.
        vocab_size: columns of the logits.
    """

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._slots: dict[int, _Slot] = {}

    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot; whatever the slot held is forgotten. After a preemption, what it had sampled is
        followed again."""
        self._slots.pop(admission.slot, None)
        spec = admission.grammar
        if spec is None:
            return
        compiled = self._compiler.compiled(spec) if self._compiler is not None else None
        if compiled is None:
            # The request has ended meanwhile, and nobody else uses its grammar: its rows are dropped.
            self._slots[admission.slot] = _Slot(None, (), error="the grammar is not compiled")
            return
        slot = _Slot(compiled.matcher(), spec.starts_after or (), self._all_but(spec.withheld))
        for token_id in admission.token_ids[admission.prompt_len :]:
            slot.accept(token_id)
        self._slots[admission.slot] = slot

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Places in `slots` whose next token is constrained, ascending."""
        if not self._slots:
            return []
        return [row for row, slot in enumerate(slots) if self._is_active(slot)]

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> NDArray[np.int32]:
        """Masks of `slots[row]` for each of `rows` (see `rows`): [len(rows), ceil(V / 32)], a bit a token."""
        words = np.empty((len(rows), self._num_words), dtype=np.int32)
        for place, row in enumerate(rows):
            slot = self._slots[slots[row]]
            if slot.marker:
                assert slot.before is not None, "rows() names only slots that have a mask"
                words[place] = slot.before
                continue
            assert slot.matcher is not None, "rows() names only slots that have one"
            begin_s = time.thread_time()
            if not slot.fill(words[place]):
                words[place] = -1
            slot.credit_s -= time.thread_time() - begin_s
        return words

    def accept(self, slot: int, token_id: int) -> str | None:
        """A slot has sampled a token. Returns why the sequence cannot go on, or None. Any slot may be named."""
        held = self._slots.get(slot)
        if held is None:
            return None
        begin_s = time.thread_time()
        held.accept(token_id)
        held.credit_s = min(CREDIT_S, held.credit_s + EARNED_S - (time.thread_time() - begin_s))
        if held.error is None and held.credit_s < 0:
            limit_ms = EARNED_S * 1000
            held.error = (
                f"{CANNOT_FOLLOW}it takes more than {limit_ms:g} ms of CPU time a token; make it less ambiguous or "
                "smaller"
            )
        return held.error

    def _is_active(self, slot: int) -> bool:
        held = self._slots.get(slot)
        return held is not None and held.error is None and (not held.marker or held.before is not None)

    def _all_but(self, token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """A mask row without these ids; None when there are none."""
        if not token_ids:
            return None
        words = np.full(self._num_words, 0xFFFFFFFF, dtype=np.uint32)
        for token_id in token_ids:
            if token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return words.view(np.int32)
