"""The keywords of a string, made exact: a pattern or a format beside length bounds becomes one pattern. No torch."""

from __future__ import annotations

import math
import re

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.format_patterns import FORMAT_PATTERNS, LONG_CHARS, LONG_PATTERNS, SHORT_PATTERNS
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.pattern_length import lengths_of, within
from tokenspeed.grammar.patterns import MAX_CHARS, check_pattern
from tokenspeed.grammar.schema_merge import EmptySchema, Schema
from tokenspeed.grammar.schema_types import CALENDAR, FORMATS, check_order

MAX_HELD_LEN = 256
"""A most length above it is taken for this one beside a pattern or a format that would go on without end: a count of
more characters costs xgrammar seconds to compile or, above 128 in one place, 4 ms a token (with 49k tokens)."""

READ_STEPS, NARROW_STEPS = 1, 4
"""Of a budget, for each character of a pattern: it is read, or narrowed to a length (about 1 and 4 us)."""

_FORMAT_LENGTHS = {
    "date": (10, 10), "uuid": (36, 36), "ipv4": (7, 15), "ipv6": (2, 45), "date-time": (20, math.inf),
    "time": (9, math.inf), "duration": (3, math.inf), "email": (3, math.inf), "hostname": (1, math.inf),
    "uri": (2, math.inf),
}  # fmt: skip
"""The least and the most characters that a string of a format has. inf: no most that the libraries keep."""

_AS_PATTERNS = frozenset(("ipv4", "relative-json-pointer"))
"""Formats of which xgrammar knows less (it takes `1.2.3.019`) or llguidance nothing."""

_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?:"
    r"(?P<any>\\d\*\\\.\?\\d\*\$)"
    r"|\\d\*\\\.\?\\d\{0,(?P<places>\d{1,3})\}0\*\$"
    r"|\(\?:\\d\{0,(?P<digits>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
    r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(?P<behind>\d{1,3})\})0\*\$\))"
)
"""How pydantic 2 (2.11 to 2.13) writes a Decimal, with and without max_digits and decimal_places."""


def string_of(own: Schema, where: str, budget: Budget) -> Schema:
    """The keywords of a string.

    Args:
        budget: what reading a pattern is charged to.

    Raises:
        EmptySchema: no string obeys them.
        GrammarError: they cannot be held together; the budget is spent.
    """
    if own.get("format") not in FORMATS:
        own.pop("format", None)
    check_order(own, "minLength", "maxLength", where)
    _drop_lengths_of_format(own, where)
    if "pattern" in own and "format" in own:
        raise GrammarError(f"{where}/pattern: not together with format; say it all in the pattern")
    if isinstance(own.get("pattern"), str):
        budget.spend(READ_STEPS * min(len(own["pattern"]), MAX_CHARS))
    if "pattern" in own:
        try:
            own["pattern"] = whole(own["pattern"])
        except GrammarError as error:
            raise GrammarError(f"{where}/pattern: {error}") from None
    if "pattern" in own or "format" in own:
        _hold_lengths(own, where, budget)
    if own.get("format") in CALENDAR:
        own["pattern"] = CALENDAR[own.pop("format")]
    if own.get("format") in _AS_PATTERNS:
        own["pattern"] = whole(FORMAT_PATTERNS[own.pop("format")])
    return own


def whole(pattern: str) -> str:
    """The pattern so that every library takes it for the whole string: some look only for a part, as the standard has
    it, some ignore anchors."""
    return f"^(?:{check_pattern(plain_decimal(pattern))})$"


def plain_decimal(pattern: str) -> str:
    """A pattern of pydantic's for decimal numbers without its look-aheads, which say no more than that there is a digit
    and how many there are: numbers with a digit in front of the point. Any other pattern as it is."""
    found = _DECIMAL.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        return pattern
    if found["any"]:
        return r"[+-]?[0-9]+(?:\.[0-9]*)?"
    if found["places"]:
        return rf"[+-]?[0-9]+(?:\.[0-9]{{0,{found['places']}}})?"
    digits = int(found["digits"])
    if found["behind"]:
        front = f"[0-9]{{1,{digits}}}" if digits else "0"
        return rf"[+-]?{front}(?:\.[0-9]{{0,{found['behind']}}})?"
    # All of them together are counted.
    parted = "".join(rf"|[0-9]{{1,{front}}}\.[0-9]{{0,{digits - front}}}" for front in range(1, digits))
    return f"[+-]?(?:[0-9]{{1,{digits}}}{parted})" if digits else r"[+-]?0"


def _drop_lengths_of_format(own: Schema, where: str) -> None:
    """Lengths that a format has anyway say nothing; others leave none of it."""
    if own.get("format") not in _FORMAT_LENGTHS:
        return
    least, most = _FORMAT_LENGTHS[own["format"]]
    low, high = own.get("minLength", 0), own.get("maxLength", most)
    if high < least or low > most:
        raise EmptySchema(f"{where}: no {own['format']} has a length between {low} and {high}")
    if low <= least:
        own.pop("minLength", None)
    if high >= most:
        own.pop("maxLength", None)


def _hold_lengths(own: Schema, where: str, budget: Budget) -> None:
    """The lengths, as part of the pattern.

    Raises:
        EmptySchema: no match has such a length.
        GrammarError: there is no such pattern.
    """
    low, high = own.pop("minLength", 0), own.pop("maxLength", None)
    kind = own.get("format")
    if low == 0 and high is None:
        return
    key = "pattern" if kind is None else "format"
    source = own["pattern"] if kind is None else _pattern_for(kind, high)
    budget.spend(NARROW_STEPS * len(source))
    try:
        if high is not None and high > MAX_HELD_LEN:
            least, most = lengths_of(source)
            if most > high:  # else it is held already
                high = min(high, max(MAX_HELD_LEN, least, low))
        held = within(source, low, high)
    except GrammarError as error:
        raise GrammarError(f"{where}/{key}: {error}") from None
    if held is None:
        lengths = f"minLength {low}" if high is None else f"lengths between {low} and {high}"
        raise GrammarError(f"{where}/{key}: not together with {lengths}; say it all in the pattern")
    own.pop("format", None)
    own["pattern"] = whole(held)


def _pattern_for(kind: str, high: int | None) -> str:
    """A format's pattern for strings of at most so many characters."""
    if kind in CALENDAR:
        return CALENDAR[kind]
    if high is None:
        return FORMAT_PATTERNS[kind]
    short = {**SHORT_PATTERNS, **LONG_PATTERNS} if high >= LONG_CHARS else SHORT_PATTERNS
    return short.get(kind, FORMAT_PATTERNS[kind])
