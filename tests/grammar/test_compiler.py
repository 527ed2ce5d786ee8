"""The worker process: what comes back, what is killed, what is remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from grammar_support import BYTES, takes

from tokenspeed.grammar import compiler as compiler_room
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import GrammarError, GrammarOptions
from tokenspeed.protocol.grammar import GrammarSpec


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=3.0)
    yield made
    made.close()


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def test_compiles_and_remembers(compiler: GrammarCompiler):
    spec = regex("[0-9]+")
    assert compiler.compiled(spec) is None
    grammar = compiler.submit(spec).result(60)
    assert takes(grammar, "12")
    assert compiler.compiled(spec) is grammar
    assert compiler.submit(GrammarSpec(kind="regex", text="[0-9]+", starts_after=(1,))).result(0) is grammar


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler):
    first, second = compiler.submit(regex("x{3}")), compiler.submit(regex("x{3}"))
    assert first.result(60) is second.result(60)


def test_a_bad_grammar_says_why_and_is_remembered(compiler: GrammarCompiler):
    with pytest.raises(GrammarError, match="parenthesis"):
        compiler.submit(regex("(a")).result(60)
    again = compiler.submit(regex("(a"))
    assert again.done()
    with pytest.raises(GrammarError, match="parenthesis"):
        again.result(0)


def test_what_nobody_waits_for_is_not_compiled(compiler: GrammarCompiler):
    """Behind as many that take long as there are workers; one that has begun goes on."""
    bombs = [regex(".?" * 3000 + letter) for letter in "ab"]
    long = [compiler.submit(bomb) for bomb in bombs]
    while not all(future.running() for future in long):
        time.sleep(0.001)
    queued, wanted = compiler.submit(regex("y{3}")), compiler.submit(regex("z{3}"))
    compiler.forget(regex("y{3}"))
    compiler.forget(bombs[0])
    compiler.forget(regex("never seen"))
    assert queued.cancelled() and not wanted.cancelled() and not long[0].cancelled()
    assert wanted.result(60) is compiler.compiled(regex("z{3}"))
    again = compiler.submit(regex("y{3}"))
    assert again is not queued and takes(again.result(60), "yyy")


BOMBS = {
    "many optional characters": ("regex", ".?" * 5000),
    "counts in counts": ("regex", "((.{1,300}){1,300}){1,300}"),
    "counts in counts of a grammar": ("ebnf", 'root ::= (("a"{1,1000}){1,1000}){1,1000}'),
    "deep schema": ("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_and_harm_nobody(compiler: GrammarCompiler, name: str):
    """Those the server's own checks would let through or not: the worker's limits hold alone."""
    kind, text = BOMBS[name]
    with pytest.raises(
        GrammarError, match=r"not compiled within|to follow|memory|crashed|nest|recursion|deep|too large"
    ):
        compiler.submit(GrammarSpec(kind=kind, text=text)).result(60)
    assert takes(compiler.submit(regex(f"[a-z]{{{len(name)}}}")).result(60), "a" * len(name))


def test_the_cache_is_bounded_and_what_is_used_stays():
    small = GrammarCompiler("llguidance", lambda: BYTES, GrammarOptions(), timeout_s=10.0, cache_bytes=1)
    try:
        used = small.submit(regex("a")).result(60)
        small.submit(regex("b")).result(60)
        small.submit(regex("c")).result(60)
        assert small.compiled(regex("a")) is used
        assert small.compiled(regex("b")) is None
        assert small.compiled(regex("c")) is not None
    finally:
        small.close()


def test_the_cache_is_bounded_by_bytes_and_told():
    """Tools with limited strings take much memory: what is kept of them is what was used last, within the limit."""
    probe = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=10.0)
    specs = [
        GrammarSpec(
            kind="json_schema",
            text=json.dumps(
                {
                    "type": "object",
                    "properties": {f"p{place}": {"type": "string", "maxLength": 50 + number} for place in range(8)},
                }
            ),
        )
        for number in range(4)
    ]
    try:
        one = probe.submit(specs[0]).result(60)
        assert probe.num_grammars == 1 and probe.grammar_bytes == one.num_bytes + len(specs[0].text)
        each = probe.grammar_bytes
    finally:
        probe.close()
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=10.0, cache_bytes=each * 5 // 2)
    try:
        assert (made.num_grammars, made.grammar_bytes) == (0, 0)
        for spec in (*specs[:2], specs[0], specs[2]):
            made.submit(spec).result(60)
        assert [made.compiled(spec) is not None for spec in specs] == [True, False, True, False]
        assert made.num_grammars == 2 and each < made.grammar_bytes <= each * 5 // 2
        used = made.compiled(specs[0])
        made.submit(specs[3]).result(60)
        made.submit(specs[1]).result(60)
        assert used is made.compiled(specs[0]) and made.num_grammars == 3, "one is in use, two are kept"
        assert made.grammar_bytes > each * 5 // 2
    finally:
        made.close()


def test_a_grammar_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    """However full the cache is, a request keeps its grammar: so one alone is bounded, too."""
    monkeypatch.setattr(compiler_room, "MAX_GRAMMAR_BYTES", 1)
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=10.0)
    try:
        with pytest.raises(GrammarError, match="MiB of memory, the limit is 0 MiB; make it smaller"):
            made.submit(regex("a")).result(60)
        assert made.num_grammars == 0
    finally:
        made.close()


def test_what_is_remembered_of_bad_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_room, "REFUSAL_BYTES", 300)
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=10.0)
    try:
        for letter in "abc":
            with pytest.raises(GrammarError):
                made.submit(regex("(" + letter * 100)).result(60)
        assert made.submit(regex("(" + "c" * 100)).done()
        assert not made.submit(regex("(" + "a" * 100)).done()
    finally:
        made.close()


def test_a_closed_compiler_fails_what_is_open():
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=60.0)
    made.submit(regex("a")).result(60)
    bomb = made.submit(regex(".?" * 6000))
    while not bomb.running():
        time.sleep(0.001)
    made.close()
    with pytest.raises((GrammarError, RuntimeError)):
        bomb.result(30)
