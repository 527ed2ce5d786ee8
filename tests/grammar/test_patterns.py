"""Regular expressions: what the scan refuses, and what it leaves alone."""

from __future__ import annotations

import re

import pytest
from grammar_support import byte_backend, compiled, takes
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.patterns import MAX_CHARS, MAX_COPIES, check_pattern
from tokenspeed.grammar.select import BACKENDS


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("^a$", "a"), ("a", "a"), ("^a|^b$", "a|b"), (r"\^\$", r"\^\$"), ("[$^]", "[$^]"), ("[]a]", "[]a]"),
        ("(?P<x>a)", "(a)"), ("(?<x>a)", "(a)"), ("(?:a)", "(?:a)"), ("a{2,}", "a{2,}"), (r"[\]]", r"[\]]"),
    ],
)  # fmt: skip
def test_only_anchors_and_names_go(pattern: str, kept: str):
    assert check_pattern(pattern) == kept


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "look-ahead"), ("(?!a)", "look-ahead"), ("(?<=a)", "look-behind"), ("(?<!a)", "look-behind"),
        ("(?>a)", "atomic"), ("(?i)a", "flags"), ("(?i:a)", "flags"), (r"\bfoo", r"\\b at 0"), (r"(a)\1", "back ref"),
        ("a^b", "inside"), ("(^a)", "inside"), ("a$b", "inside"), ("(a", "without its"), ("a)", "without its"),
        ("[a", "without its"), ("a\\", "single backslash"), ("a" * (MAX_CHARS + 1), "limit"),
        ("((a{100}){100}){100}", "1000000 times"), ("a{1,100000}", "100000 times"), ("(a{200}){3,200}", "40000 times"),
        ("((.{1,30}){1,30}){1,30}", "27000 times"),
    ],
)  # fmt: skip
def test_refusals_say_what_and_where(pattern: str, why: str):
    with pytest.raises(GrammarError, match=why):
        check_pattern(pattern)


def test_counts_side_by_side_are_not_multiplied():
    assert check_pattern(f"a{{{MAX_COPIES}}}b{{{MAX_COPIES}}}")


@given(st.text(alphabet="ab^$()[]{}|\\?*+1,:=<", max_size=12))
def test_scan_never_breaks(pattern: str):
    """Any text is refused in words or comes back as an expression that matches no other whole texts."""
    try:
        kept = check_pattern(pattern)
    except GrammarError:
        return
    try:
        before, after = re.compile(pattern), re.compile(kept)
    except (re.error, FutureWarning):
        return  # the library will say so
    for text in ("", "a", "b", "ab", "aab", "1", "{", "^", "$", "a^", "$b"):
        assert bool(before.fullmatch(text)) == bool(after.fullmatch(text))


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d{3}-\d{4}", ["555-1234"], ["555-123", "x"]), ("(yes|no)", ["yes", "no"], ["", "yesno"]),
        ("[a-z]+@[a-z]+\\.(com|org)", ["a@b.com"], ["a@b.net"]), ("é[^x]", ["éa", "éé"], ["ex", "éx"]),
        ("(a+)+", ["aaa"], ["", "b"]), ("^a|^b$", ["a", "b"], ["ab"]),
    ],
)  # fmt: skip
def test_whole_output_matches(pattern: str, good: list[str], bad: list[str], library: str):
    grammar = compiled(byte_backend(library), "regex", check_pattern(pattern))
    assert [text for text in good + bad if takes(grammar, text)] == good


@pytest.mark.parametrize("library", BACKENDS)
def test_grammars_in_gbnf(library: str):
    text = 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"'
    grammar = compiled(byte_backend(library), "ebnf", text)
    assert takes(grammar, "1,(2,3),4")
    assert not takes(grammar, "1,(2")
    with pytest.raises(GrammarError):
        byte_backend(library).compile("ebnf", "root ::= nothing_like_this")
