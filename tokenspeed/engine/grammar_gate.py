"""Requests whose grammar is being compiled wait here, in front of the scheduler. The engine's loop, one thread.

Owns them until their grammar is ready or refused, then keeps the grammar alive until their last sequence has ended.
They enter the scheduler in the order in which they came, as far as that keeps nobody waiting for another's grammar.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import CompiledGrammar, GrammarError
from tokenspeed.protocol.errors import Overloaded
from tokenspeed.protocol.grammar import GRAMMARS_BUSY, INVALID_GRAMMAR
from tokenspeed.protocol.messages import AddRequest, FinishReason, SequenceOutput

logger = logging.getLogger(__name__)

OFF = "constrained decoding is off on this server; start it with --grammar-backend xgrammar or llguidance"


@dataclass(slots=True)
class _Held:
    """`aborted`: those of its sequences that are not wanted any more."""

    request: AddRequest
    future: Future[CompiledGrammar]
    aborted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Pin:
    compiled: CompiledGrammar
    num_left: int


class GrammarGate:
    """See the module.

    Args:
        compiler: None when constrained decoding is off.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._held: dict[str, _Held] = {}
        self._num_waiting_for: Counter[Future[CompiledGrammar]] = Counter()
        self._pins: dict[str, _Pin] = {}

    @property
    def is_holding(self) -> bool:
        """True while a request waits here."""
        return bool(self._held)

    @property
    def memory(self) -> tuple[int, int]:
        """Compiled grammars in memory, and the bytes that they take."""
        return (0, 0) if self._compiler is None else (self._compiler.num_grammars, self._compiler.grammar_bytes)

    @property
    def num_sequences(self) -> int:
        """Sequences of the requests that wait here."""
        return sum(held.request.sampling.n for held in self._held.values())

    def hold(self, request: AddRequest) -> list[SequenceOutput]:
        """Take a request with a grammar.

        Returns:
            Terminal outputs, when it is known now that the grammar cannot be used.
        """
        assert request.grammar is not None
        if self._compiler is None:
            return _ends(request, "error", OFF, INVALID_GRAMMAR)
        future = self._compiler.submit(request.grammar)
        self._held[request.request_id] = _Held(request, future)
        self._num_waiting_for[future] += 1
        return []

    def release(self) -> tuple[list[tuple[AddRequest, list[int]]], list[SequenceOutput]]:
        """Who is done waiting.

        Returns:
            Requests for the scheduler, each with the sequences to abort at once; and terminal outputs of the others.
        """
        ready: list[tuple[AddRequest, list[int]]] = []
        outputs: list[SequenceOutput] = []
        for held in [held for held in self._held.values() if held.future.done()]:
            request = held.request
            self._let_go(held)
            error = held.future.exception()
            if error is None:
                self._pins[request.request_id] = _Pin(held.future.result(), request.sampling.n)
                ready.append((request, held.aborted))
            elif isinstance(error, GrammarError):
                outputs += _ends(request, "error", f"the grammar cannot be used: {error}", INVALID_GRAMMAR)
            elif isinstance(error, Overloaded):
                outputs += _ends(request, "error", str(error), GRAMMARS_BUSY)
            else:
                logger.error("request %s: its grammar could not be compiled", request.request_id, exc_info=error)
                outputs += _ends(request, "error", f"the grammar could not be compiled: {error}")
        return ready, outputs

    def abort(self, request_id: str, index: int | None) -> list[SequenceOutput]:
        """End a request that waits here, or note that one of its sequences is not wanted. A grammar that nobody waits
        for any more leaves the queue, so that it holds up no other."""
        held = self._held.get(request_id)
        if held is None:
            return []
        if index is not None:
            held.aborted.append(index)
            return []
        self._let_go(held)
        return _ends(held.request, "abort")

    def abort_all(self, reason: FinishReason, error: str | None) -> list[SequenceOutput]:
        """End everything that waits here."""
        outputs = [output for held in self._held.values() for output in _ends(held.request, reason, error)]
        for held in list(self._held.values()):
            self._let_go(held)
        return outputs

    def _let_go(self, held: _Held) -> None:
        """A request leaves; the last one that waited for a grammar takes that along."""
        request, future = held.request, held.future
        del self._held[request.request_id]
        self._num_waiting_for[future] -= 1
        if not self._num_waiting_for[future]:
            del self._num_waiting_for[future]
            if not future.done():
                assert self._compiler is not None and request.grammar is not None
                self._compiler.forget(request.grammar)

    def note(self, outputs: list[SequenceOutput]) -> None:
        """Let go of the grammars of requests whose last sequence has ended."""
        if not self._pins:
            return
        for output in outputs:
            pin = self._pins.get(output.request_id) if output.finish_reason is not None else None
            if pin is not None:
                pin.num_left -= 1
                if pin.num_left == 0:
                    del self._pins[output.request_id]


def _ends(
    request: AddRequest, reason: FinishReason, error: str | None = None, code: str | None = None
) -> list[SequenceOutput]:
    return [
        SequenceOutput(request_id=request.request_id, index=index, finish_reason=reason, error=error, error_code=code)
        for index in range(request.sampling.n)
    ]
