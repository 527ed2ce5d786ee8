"""The grammars of the sequences in slots: which rows are constrained, what each may sample, what it has sampled. Also
the reasoning in front of them, which a grammar waits for and a budget may close.

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
from tokenspeed.protocol.grammar import INVALID_GRAMMAR, GrammarSpec
from tokenspeed.protocol.sampling import ThinkingBudget
from tokenspeed.protocol.step import Admission

CREDIT_S = 0.25
"""CPU seconds a sequence may spend at once on mask and acceptance; usual is 0.0001 a token."""

EARNED_S = 0.003
"""What each token gives back of it."""

MIN_TOGETHER = 4
"""Masks from which on a step's are filled on several cores."""

SLOW_S = 0.001
"""A mask of more is filled, and charged, by itself; usual is a tenth."""

APART_TOKENS = 16
"""For so many tokens behind a slow mask, a sequence's are filled by themselves."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a sequence cannot go on; the fields are `RowResult.error` and `error_code`."""

    error: str
    code: str | None = None

    @staticmethod
    def of_grammar(reason: str) -> Fault:
        """The request's own grammar is at fault, found while it was followed."""
        return Fault(f"the grammar cannot be followed: {reason}"[:500], INVALID_GRAMMAR)


@dataclass(slots=True)
class _Reasoning:
    """The reasoning that an output begins with, until `ends` has been sampled.

    Fields:
        mask: what may be sampled meanwhile, [ceil(V / 32)]; None: anything.
        budget: tokens after which `closing` is forced, token by token; None: never.
        bridge: see `GrammarSpec`.
        tail: the last sampled tokens.
        num_closed, num_bridged: tokens of `closing` and of `bridge` that have been sampled.
    """

    ends: tuple[int, ...]
    mask: NDArray[np.int32] | None
    budget: ThinkingBudget | None
    bridge: tuple[int, ...] = ()
    tail: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_closed: int = 0
    num_bridged: int = 0

    @property
    def forced(self) -> int | None:
        """The only token that may come next: on the bridge, or once the budget is spent."""
        if self.num_bridged:
            return self.bridge[self.num_bridged]
        if self.budget is None or self.num_tokens < self.budget.num_tokens:
            return None
        return self.budget.closing[self.num_closed]

    def accept(self, token_id: int) -> bool:
        """A token has been sampled. True: it was the last one of the reasoning."""
        forced = self.forced
        self.num_tokens += 1
        self.tail = [*self.tail, token_id][-len(self.ends) :]
        if tuple(self.tail) == self.ends:
            return True
        if self.bridge and token_id == self.bridge[self.num_bridged]:
            self.num_bridged += 1
        elif self.budget is not None and forced is None and token_id == self.budget.over_at:
            return True
        elif forced is not None and token_id == forced:
            self.num_closed += 1
        elif self.budget is not None and self.forced is not None:  # the model may have begun to close it by itself
            begun = range(len(self.budget.closing) - 1, 0, -1)
            closing = self.budget.closing
            self.num_closed = next((n for n in begun if tuple(self.tail[-n:]) == closing[:n]), 0)
        return False


@dataclass(slots=True)
class _Slot:
    """One constrained sequence.

    Fields:
        matcher: follows the output behind the reasoning; None: nothing constrains it there.
        reasoning: None when there is none, or no more.
        error: why the sequence cannot go on.
        credit_s: CPU seconds left to spend.
        num_apart: masks still to be filled by themselves, timed.
    """

    matcher: Matcher | None
    reasoning: _Reasoning | None = None
    error: Fault | None = None
    credit_s: float = CREDIT_S
    num_apart: int = 0

    @property
    def is_active(self) -> bool:
        """The next token is constrained."""
        if self.error is not None or self.reasoning is None:
            return self.error is None and self.matcher is not None
        return self.reasoning.mask is not None or self.reasoning.forced is not None

    def accept(self, token_id: int) -> None:
        if self.error is not None:
            return
        if self.reasoning is not None:
            if self.reasoning.accept(token_id):
                self.reasoning = None
        elif self.matcher is not None and not self.matcher.is_terminated:
            self._follow(self.matcher, token_id)
        # Else a step that was planned before the end was known: dropped by the scheduler.

    def fill(self, row: MaskRow) -> bool:
        """See `Matcher.fill`. What the library cannot do costs this sequence alone, after the step."""
        assert self.matcher is not None
        try:
            return self.matcher.fill(row)
        except Exception as error:
            self.error = Fault.of_grammar(f"{type(error).__name__}: {error}")
            return False

    def _follow(self, matcher: Matcher, token_id: int) -> None:
        try:
            is_allowed = matcher.accept(token_id)
        except Exception as error:  # whatever the library raises is about this grammar
            self.error = Fault.of_grammar(f"{type(error).__name__}: {error}")
            return
        if matcher.failure is not None:
            self.error = Fault.of_grammar(matcher.failure)
        elif not is_allowed:
            self.error = Fault(f"the token {token_id} was sampled although the grammar does not allow it")


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
        spec, budget = admission.grammar, admission.sampling.thinking
        if spec is None and budget is None:
            return
        slot = self._slots[admission.slot] = _Slot(None, self._reasoning(spec, budget))
        if spec is not None and not self._compile(slot, spec):
            return
        for token_id in admission.token_ids[admission.prompt_len :]:
            slot.accept(token_id)

    def _compile(self, slot: _Slot, spec: GrammarSpec) -> bool:
        compiled = self._compiler.compiled(spec) if self._compiler is not None else None
        if compiled is None:
            # The request has ended meanwhile, and nobody else uses its grammar: its rows are dropped.
            slot.error = Fault("the grammar is not compiled")
            return False
        slot.matcher = compiled.matcher()
        return True

    def _reasoning(self, spec: GrammarSpec | None, budget: ThinkingBudget | None) -> _Reasoning | None:
        ends = budget.ends if budget is not None else None
        if spec is not None:
            ends = spec.starts_after
        if ends is None:
            return None
        if spec is None:
            return _Reasoning(ends, None, budget)
        return _Reasoning(ends, self._all_but(spec.withheld), budget, spec.bridge)

    def holds(self, slot: int) -> bool:
        """Whether a slot has a grammar or a budget, now or later in its output."""
        return slot in self._slots

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Places in `slots` whose next token is constrained, ascending."""
        if self._slots.keys().isdisjoint(slots):
            return []
        return [row for row, slot in enumerate(slots) if self._is_active(slot)]

    def fill(
        self, slots: Sequence[int], rows: Sequence[int], out: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """Masks of `slots[row]` for each of `rows` (see `rows`): [len(rows), ceil(V / 32)], a bit a token; into `out`
        where that is given."""
        words = np.empty((len(rows), self._num_words), dtype=np.int32) if out is None else out
        mine = [self._slots[slots[row]] for row in rows]
        together, was_slow = self._fill_together(mine, words)
        done = frozenset() if was_slow else together
        for place, slot in enumerate(mine):
            if place in done:
                continue
            if slot.reasoning is not None:
                words[place] = self._reasoning_mask(slot.reasoning)
                continue
            self._fill_apart(slot, words[place], num_fills=2 if place in together else 1)
        if was_slow and not any(mine[place].num_apart for place in together):
            for place in together:  # many that are each quick: nothing is won by filling them together
                mine[place].num_apart = APART_TOKENS
        return words

    def _fill_apart(self, slot: _Slot, row: MaskRow, num_fills: int) -> None:
        """Fill one mask and charge for it. A slow one has been waited for `num_fills` times."""
        begin_s = time.thread_time()
        if not slot.fill(row):
            row[:] = -1
        took_s = time.thread_time() - begin_s
        is_slow = took_s > SLOW_S
        slot.credit_s -= took_s * num_fills if is_slow else took_s
        slot.num_apart = APART_TOKENS if is_slow else max(0, slot.num_apart - 1)

    def _fill_together(self, slots: Sequence[_Slot], words: NDArray[np.int32]) -> tuple[frozenset[int], bool]:
        """Fill the rows of those that are usually quick, on several cores.

        Returns:
            Their places, none when they are few or one of them failed; and whether it took long. Then each has to be
            filled by itself now: at its next token whoever was slow may be quick (a grammar can alternate).
        """
        places, matchers = [], []
        for place, slot in enumerate(slots):
            matcher = slot.matcher
            if slot.reasoning is None and not slot.num_apart and matcher is not None and not matcher.is_terminated:
                places.append(place)
                matchers.append(matcher)
        if len(places) < MIN_TOGETHER or self._compiler is None:
            return frozenset(), False
        filled = words if len(places) == len(slots) else np.empty((len(places), self._num_words), dtype=np.int32)
        begin_s = time.perf_counter()
        try:
            self._compiler.fill_all(matchers, filled)
        except Exception:  # of one matcher, no matter which
            return frozenset(), False
        if filled is not words:
            words[places] = filled
        return frozenset(places), time.perf_counter() - begin_s > SLOW_S * (1 + len(places) / 8)

    def accept(self, slot: int, token_id: int) -> Fault | None:
        """A slot has sampled a token. Returns why the sequence cannot go on, or None. Any slot may be named."""
        held = self._slots.get(slot)
        if held is None:
            return None
        begin_s = time.thread_time()
        held.accept(token_id)
        if held.matcher is None and held.reasoning is None and held.error is None:
            del self._slots[slot]  # it had only a budget
            return None
        held.credit_s = min(CREDIT_S, held.credit_s + EARNED_S - (time.thread_time() - begin_s))
        if held.error is None and held.credit_s < 0:
            limit_ms = EARNED_S * 1000
            held.error = Fault.of_grammar(
                f"it takes more than {limit_ms:g} ms of CPU time a token; make it less ambiguous or smaller"
            )
        return held.error

    def _is_active(self, slot: int) -> bool:
        held = self._slots.get(slot)
        return held is not None and held.is_active

    def _reasoning_mask(self, reasoning: _Reasoning) -> NDArray[np.int32]:
        forced = reasoning.forced
        if forced is None:
            assert reasoning.mask is not None, "rows() names only slots that have one"
            return reasoning.mask
        words = np.zeros(self._num_words, dtype=np.uint32)
        words[forced // 32] = np.uint32(1 << forced % 32)
        return words.view(np.int32)

    def _all_but(self, token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """A mask row without these ids; None when there are none."""
        if not token_ids:
            return None
        words = np.full(self._num_words, 0xFFFFFFFF, dtype=np.uint32)
        for token_id in token_ids:
            if token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return words.view(np.int32)
