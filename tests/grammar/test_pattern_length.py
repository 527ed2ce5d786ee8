"""Patterns between length bounds: all that is left was there before and has such a length, and something is left."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.format_patterns import FORMAT_PATTERNS, SHORT_PATTERNS
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import NamePattern
from tokenspeed.grammar.pattern_length import within
from tokenspeed.grammar.patterns import MAX_CHARS, check_pattern
from tokenspeed.grammar.schema_strings import plain_decimal, whole

WORDS = ["".join(letters) for length in range(8) for letters in itertools.product("a-", repeat=length)]
DIGITS = ["".join(letters) for length in range(6) for letters in itertools.product("-.01", repeat=length)]

ATOMS = st.sampled_from(["a", "-", "[a-]", "a-"])
COUNTS = st.sampled_from(["", "?", "*", "+", "{0,2}", "{2}", "{2,}", "{1,9}"])
PARTS = st.recursive(
    st.builds(lambda atom, count: f"(?:{atom}){count}", ATOMS, COUNTS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds(lambda one, other, count: f"(?:{one}|{other}){count}", inner, inner, COUNTS),
    ),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(PARTS, st.integers(0, 5), st.one_of(st.none(), st.integers(0, 7)))
def test_only_what_fits_is_left(pattern: str, low: int, high: int | None):
    narrowed = within(whole(pattern), low, high)
    if narrowed is None:
        return
    before, after = (NamePattern(whole(each), Budget(10**7)) for each in (pattern, narrowed))
    left = [word for word in WORDS if after.is_in(word)]
    for word in left:
        assert before.is_in(word) and low <= len(word) <= (7 if high is None else high), (narrowed, word)
    if high is not None:
        assert left, narrowed


@pytest.mark.parametrize(
    ("pattern", "low", "high", "narrowed"),
    [
        ("^a+$", 2, None, "a{2,}"),
        ("^a*$", 0, 3, "a{0,3}"),
        ("^a{1,9}$", 2, 3, "a{2,3}"),
        ("^[a-z]+@[a-z]+$", 0, 9, "[a-z]{1,4}@[a-z]{1,4}"),
        ("^(a|bc|def)$", 2, 2, "bc"),
        ("^(ab){3}$", 0, 9, "(?:ab){3}"),
        ("^a\\.b?$", 3, None, "a\\.b"),
        ("^a-b *$", 3, 5, "a-b {0,2}"),
        ("^abc$", 4, None, None),
        ("^abc$", 0, 2, None),
        ("^a*$", 0, 200, "a{0,128}"),
    ],
)
def test_how_it_is_written(pattern: str, low: int, high: int | None, narrowed: str | None):
    assert within(pattern, low, high) == narrowed


@pytest.mark.parametrize("name", sorted(SHORT_PATTERNS))
def test_short_formats_are_parts_of_the_formats(name: str):
    texts = ["a@b", "ab.c@d-e.f", "a", "a-b.c", "http://a.b:80/c?d=e/f", "urn:a:b", "https://a-b?c", "mailto:x@y"]
    short = [text for text in texts if re.fullmatch(SHORT_PATTERNS[name], text)]
    assert short and all(re.fullmatch(FORMAT_PATTERNS[name], text) for text in short)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,4}0*$)\d{0,0}\.\d{0,2}0*$)",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,4}0*$)\d{0,2}\.\d{0,1}0*$)",
    ],
)
def test_decimals_of_pydantic(pattern: str):
    """What is written in their place is valid for them, and a number; the simplest ones are there."""
    plain = plain_decimal(pattern)
    assert plain != pattern
    taken = [text for text in DIGITS if re.fullmatch(plain, text)]
    assert "0" in taken and "-0" in taken
    for text in taken:
        assert re.search(pattern, text) and float(text) is not None, text


def test_other_patterns_stay():
    assert plain_decimal("^(?!a)b$") == "^(?!a)b$"


def test_groups_that_are_doubled_stay_short():
    """`{2,}` of a group is written as two of it: nested ones would be thousands of megabytes."""
    nested = "a" * (MAX_CHARS // 4)
    for _ in range(12):
        nested = f"({nested}){{2,}}"
    with pytest.raises(GrammarError, match="repeats a group of"):
        check_pattern(nested)
