"""Grammars that take long hold up those that do not: not any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from grammar_support import BYTES, takes

from tokenspeed.grammar import lanes as lanes_room
from tokenspeed.grammar.compiler import GrammarCompiler, _LateError
from tokenspeed.grammar.interface import CompiledGrammar, GrammarError, GrammarOptions
from tokenspeed.grammar.lanes import FIRST_S, MAX_SLOW, QUICK_S, Lanes, Ticket
from tokenspeed.protocol.errors import Overloaded
from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec

TIMEOUT_S = 60.0


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def bomb(number: int) -> GrammarSpec:
    """Most of a minute of work, each another one."""
    return regex(".?" * 6000 + "a" * number)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=TIMEOUT_S)
    yield made
    made.close()


def tickets(*names: str) -> list[Ticket]:
    return [Ticket(regex(name)) for name in names]


def test_a_small_grammar_waits_for_no_bomb(compiler: GrammarCompiler):
    """Behind six bombs one waited until two of them had used up their time."""
    bombs = [compiler.submit(bomb(number)) for number in range(1, 7)]
    small = compiler.submit(GrammarSpec(kind="json_schema", text='{"type": "integer"}'))
    assert takes(small.result(50), "12")
    assert not any(each.done() for each in bombs)
    assert takes(compiler.submit(regex("[a-f]{7}")).result(50), "abcdefa"), "nor does the next one, later"
    assert not any(each.done() for each in bombs)


class SlowCompiler(GrammarCompiler):
    """Its slow grammars are too long for any turn but the last, which ends when the test says so."""

    def __init__(self) -> None:
        super().__init__("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=TIMEOUT_S)
        self.may_end, self.begun = threading.Event(), threading.Event()

    def _ready_worker(self) -> Any:
        return None

    def _compile_text(self, kind: GrammarKind, text: str, turn_s: float) -> CompiledGrammar:
        if text.startswith("slow"):
            if turn_s < TIMEOUT_S:
                raise _LateError
            self.begun.set()
            self.may_end.wait(50)
        return Compiled()


class Compiled:
    num_bytes = 1


def test_so_many_slow_ones_may_wait(monkeypatch: pytest.MonkeyPatch):
    """What is beyond is told to come again, and is not taken for a bad grammar."""
    monkeypatch.setattr(lanes_room, "MAX_SLOW", 1)
    compiler = SlowCompiler()
    first = compiler.submit(regex("slow1"))
    assert compiler.begun.wait(50)
    second = compiler.submit(regex("slow2"))
    compiler.submit(regex("a")).result(50)  # behind it, in the lane of the quick
    third = compiler.submit(regex("slow3"))
    with pytest.raises(Overloaded, match="more than 1 s to compile, and 1 such grammars wait already") as refused:
        third.result(50)
    assert refused.value.retry_after_s > 0
    assert not first.done() and not second.done()
    compiler.may_end.set()
    assert first.result(50) and second.result(50) and compiler.submit(regex("slow3")).result(50)
    compiler.close()


def test_a_slow_grammar_that_nobody_waits_for_gives_up_its_place():
    compiler = SlowCompiler()
    first = compiler.submit(regex("slow1"))
    assert compiler.begun.wait(50)
    second = compiler.submit(regex("slow2"))
    compiler.submit(regex("a")).result(50)
    compiler.forget(regex("slow2"))
    with pytest.raises(CancelledError):
        second.result(50)
    again = compiler.submit(regex("slow2"))
    assert again is not second
    compiler.forget(regex("slow1"))  # it has begun, and goes on
    compiler.may_end.set()
    assert first.result(50) and again.result(50)
    compiler.close()


def test_closing_ends_those_that_wait():
    compiler = SlowCompiler()
    compiler.submit(regex("slow1"))
    assert compiler.begun.wait(50)
    waiting = compiler.submit(regex("slow2"))
    compiler.submit(regex("a")).result(50)
    compiler.close()
    with pytest.raises(CancelledError):
        waiting.result(50)
    with pytest.raises(RuntimeError, match="closing"):
        compiler.submit(regex("b"))
    compiler.may_end.set()


def test_a_grammar_of_more_than_a_turn_is_compiled(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    """The turns are made so short that any grammar takes longer."""
    monkeypatch.setattr(lanes_room, "FIRST_S", 0.0005)
    monkeypatch.setattr(lanes_room, "QUICK_S", 0.001)
    grammars = [compiler.submit(regex(f"x{{{number}}}")) for number in range(2, 6)]
    assert takes(grammars[0].result(50), "xx") and takes(grammars[3].result(50), "xxxxx")


def test_turns_and_their_order():
    lanes = Lanes(30.0)
    a, b, c = tickets("a", "b", "c")
    lanes.put(a)
    assert lanes.take(takes_slow=False) == (a, QUICK_S), "nobody waits behind it"
    lanes.late(a, QUICK_S)
    lanes.put(b)
    lanes.put(c)
    assert lanes.take(takes_slow=False) == (b, FIRST_S)
    lanes.late(b, FIRST_S)
    assert lanes.take(takes_slow=True) == (a, 30.0), "who takes what is slow takes it first"
    assert lanes.take(takes_slow=False) == (c, FIRST_S), "who had no turn yet is before who had one"
    assert lanes.take(takes_slow=False) == (b, QUICK_S)
    lanes.late(b, QUICK_S)
    taken: list[object] = []
    quick = threading.Thread(target=lambda: taken.append(lanes.take(takes_slow=False)))
    quick.start()
    assert lanes.leave(b) and not lanes.leave(b)
    assert lanes.close() == []
    quick.join(10)
    assert taken == [None], "what is slow was left alone"


def test_no_turn_is_longer_than_the_time_there_is_in_all():
    lanes = Lanes(0.1)
    (a,) = tickets("a")
    lanes.put(a)
    assert lanes.take(takes_slow=False) == (a, 0.1)


def test_the_limit_is_of_slow_ones_only():
    lanes = Lanes(30.0)
    waiting = tickets(*map(str, range(MAX_SLOW)))
    for each in waiting:
        lanes.late(each, QUICK_S)
    other, quick = tickets("other", "quick")
    with pytest.raises(Overloaded, match=f"{MAX_SLOW} such grammars wait already, which is the limit"):
        lanes.late(other, QUICK_S)
    lanes.late(quick, FIRST_S)
    assert lanes.leave(waiting[0])
    lanes.late(other, QUICK_S)


def test_without_a_worker_the_reason_is_told_and_it_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """A process that did not start is no fault of the grammar, which would be remembered."""
    makes = iter([OSError("no vocabulary"), OSError("no vocabulary")])

    def vocabulary():
        for error in makes:
            raise error
        return BYTES

    made = GrammarCompiler("xgrammar", vocabulary, GrammarOptions(), timeout_s=TIMEOUT_S)
    try:
        with pytest.raises(OSError, match="no vocabulary"):
            made.submit(regex("a")).result(50)
        assert takes(made.submit(regex("a")).result(50), "a")
    except GrammarError as error:
        pytest.fail(str(error))
    finally:
        made.close()
