"""The grammars of the sequences in slots: which rows are constrained, what each may sample, what it has sampled.

One thread at a time. No torch: masks are filled on the host, while a device may be computing. A token that takes its
grammar too long ends its own sequence, so that a step waits for one such token at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import Matcher
from tokenspeed.protocol.step import Admission

MAX_TOKEN_S = 0.25
"""CPU seconds that one token of one sequence may take, mask and acceptance. Usual: 0.0001."""


@dataclass(slots=True)
class _Slot:
    """One constrained sequence.

    Fields:
        marker: what has to be sampled before the constraint starts; empty once it has.
        tail: the last sampled tokens, while there is a marker to find.
        error: why the sequence cannot go on; set from the start where there is no matcher.
        spent_s: on the token that is being chosen.
    """

    matcher: Matcher | None
    marker: tuple[int, ...]
    tail: list[int] = field(default_factory=list)
    error: str | None = None
    spent_s: float = 0.0

    def accept(self, token_id: int) -> None:
        if self.matcher is None or self.error is not None or self.matcher.is_terminated:
            return  # a step that was planned before the end was known: dropped by the scheduler
        if self.marker:
            self.tail = [*self.tail, token_id][-len(self.marker) :]
            if tuple(self.tail) == self.marker:
                self.marker = ()
        elif not self.matcher.accept(token_id):
            self.error = f"the token {token_id} was sampled although the grammar does not allow it"


class Constraints:
    """Constraints of `num_slots` slots.

    Args:
        compiler: holds the compiled grammars; None when constrained decoding is off.
        vocab_size: columns of the logits.
    """

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
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
            self._slots[admission.slot] = _Slot(None, (), error="its grammar is not compiled")
            return
        slot = _Slot(compiled.matcher(), spec.starts_after or ())
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
            assert slot.matcher is not None, "rows() names only slots that have one"
            begin_s = time.thread_time()
            if not slot.matcher.fill(words[place]):
                words[place] = -1
            slot.spent_s = time.thread_time() - begin_s
        return words

    def accept(self, slot: int, token_id: int) -> str | None:
        """A slot has sampled a token. Returns why the sequence cannot go on, or None. Any slot may be named."""
        held = self._slots.get(slot)
        if held is None:
            return None
        begin_s = time.thread_time()
        held.accept(token_id)
        held.spent_s += time.thread_time() - begin_s
        if held.error is None and held.spent_s > MAX_TOKEN_S:
            held.error = (
                f"the grammar took {held.spent_s * 1000:.0f} ms for one token, the limit is {MAX_TOKEN_S * 1000:.0f} "
                "ms; make it less ambiguous"
            )
        return held.error

    def _is_active(self, slot: int) -> bool:
        held = self._slots.get(slot)
        return held is not None and not held.marker and held.error is None
