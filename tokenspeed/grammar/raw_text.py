"""Strings that stand between two marks as they are, not as JSON: held to pattern, format and length, while the texts
that end them cannot be in them. No torch.

A regular expression cannot say "and nowhere this text", so one character of each such text is taken out of whatever the
expression lets through of it by a class: less than what is valid. Where the expression asks for that character itself,
there is no way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenspeed.grammar.format_patterns import FORMAT_PATTERNS
from tokenspeed.grammar.forms import Form, any_text, regex_form, sequence, text_form
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.patterns import check_pattern

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"
_PART = re.compile(
    rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\{{\d+(?:,\d*)?\}}|.",
    re.DOTALL,
)
_MEMBER = re.compile(f"{_ESCAPE}|.", re.DOTALL)
_STRUCTURE = frozenset("()|*+?")
_NOT_CLASS = {"\\S": "\\s", "\\D": "\\d", "\\W": "\\w"}


def raw_string(schema: Mapping[str, Any], stops: Sequence[str], line: bool) -> Form:
    """A string of a rewritten schema, as text up to and with its end.

    Args:
        stops: the end, and what else ends a value, so that it cannot be in one.
        line: it stands on a line of its own: one line's end in front of it and one behind it are not its own.

    Raises:
        GrammarError: it cannot be held.
    """
    end = stops[0]
    if "pattern" in schema or "format" in schema:
        return exact_string(regex_form(without(_pattern(schema), stops)), end, line)
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    other = f"[^{''.join(dict.fromkeys(_escaped(stop[0]) for stop in stops))}]"
    if most is not None:
        return _counted(other, least, most, end, line)
    if least:
        return exact_string(sequence(regex_form(f"{other}{{{least}}}"), any_text(*stops)), end, line)
    return sequence(any_text(*stops), text_form(end))


def _counted(character: str, least: int, most: int, end: str, line: bool) -> Form:
    """So many characters, up to and with `end`.

    `end` in the same rule, and beginning with no such character, is what makes it quick to compile: measured with 49k
    tokens 0.01 s a string, against 0.6 to 1.7 with a line's end between, which makes minutes of 24 tools. So a line's
    end behind it is counted as its own: the string is never longer than it may be, and is not shorter either.
    """
    if line and least == most:
        root = f"character{{{most}}} " if most else ""
        root += json.dumps("\n" + end, ensure_ascii=False)
    else:
        root = f"character{{{least + (line and least > 0)},{most}}} {json.dumps(end, ensure_ascii=False)}"
    form = {"type": "grammar", "grammar": f"root ::= {root}\ncharacter ::= {character}"}
    return sequence(text_form("\n"), form) if line else form


def exact_string(form: Form, end: str, line: bool) -> Form:
    """A value with what stands around it; see `raw_string`."""
    return sequence(text_form("\n"), form, text_form("\n" + end)) if line else sequence(form, text_form(end))


def json_inside(schema: Any, stops: Sequence[str]) -> Any:
    """A rewritten schema, so that no JSON by it holds one of `stops` in an enum or in a string with a pattern or a
    pointer. (Of all other strings the library leaves them out when it is told so.)

    Raises:
        GrammarError: a pattern or all of an enum asks for it.
    """
    if isinstance(schema, list):
        return [json_inside(item, stops) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("enum"), list):
        values = [value for value in schema["enum"] if holds_none(json.dumps(value, ensure_ascii=False), stops)]
        if not values:
            raise GrammarError(f"no value of the enum can stand in front of {stops[0]!r}")
        return {**schema, "enum": values}
    done = {key: json_inside(value, stops) for key, value in schema.items()}
    if done.get("type") != "string":
        return done
    if "pattern" in done:
        done["pattern"] = f"^(?:{without(_pattern(done), stops)})$"
    elif str(done.get("format")).endswith("json-pointer"):
        done = {"type": "string", "pattern": f"^(?:{without(_pattern(done), stops)})$"}
    return done


def holds_none(text: str, stops: Sequence[str]) -> bool:
    """Whether none of these stands in `text`."""
    return not any(stop in text for stop in stops)


def without(pattern: str, stops: Sequence[str]) -> str:
    """The expression, or a part of what it matches, so that none of `stops` is in it.

    Raises:
        GrammarError: it asks for the characters of one.
    """
    for stop in stops:
        pattern = _without(pattern, stop)
    return pattern


def _without(pattern: str, end: str) -> str:
    parts = [found[0] for found in _PART.finditer(pattern)]
    single = [part for part in parts if _stands_for_characters(part)]
    if any(not any(_takes(part, char) for part in single) for char in set(end)):
        return pattern
    for char in dict.fromkeys(end):
        cut = [_cut(part, char) if part in single and _takes(part, char) else part for part in parts]
        if None not in cut and not char.isalnum():
            return "".join(part for part in cut if part is not None)
    raise GrammarError(
        f"the pattern {pattern[:100]!r} asks for the characters of {end!r}, which ends a value; describe it without "
        f"{end[0]!r}"
    )


def _pattern(schema: Mapping[str, Any]) -> str:
    if "pattern" in schema:
        return str(schema["pattern"])[1:-1]  # rewritten, it is "^...$" with one item inside
    return check_pattern(FORMAT_PATTERNS[schema["format"]])


def _stands_for_characters(part: str) -> bool:
    return part not in _STRUCTURE and part != "(?:" and not (part[0] == "{" and len(part) > 1)


def _takes(part: str, char: str) -> bool:
    if part == ".":
        return char not in "\n\r"
    if part[0] not in "[\\":
        return part == char
    return re.compile(part, re.ASCII).fullmatch(char) is not None


def _cut(part: str, char: str) -> str | None:
    """What a part stands for, but not `char`; None: nothing is left."""
    if part == ".":
        return rf"[^\n\r{_escaped(char)}]"
    if part in _NOT_CLASS:
        return f"[^{_NOT_CLASS[part]}{_escaped(char)}]"
    if part[0] != "[":
        return None
    inner = part[1:-1]
    if inner.startswith("^"):
        rest = inner[1:]
        return f"[^{_escaped(char)}" + ("\\" if rest.startswith("]") else "") + f"{rest}]"
    kept, others = [], []
    for low, high in _members(inner):
        if low in _NOT_CLASS and _takes(low, char):
            others.append(f"[^{_NOT_CLASS[low]}{_escaped(char)}]")
        elif not _takes(f"[{low}-{high}]" if high else f"[{low}]", char):
            kept.append(f"{low}-{high}" if high else low)
        elif high:
            kept += _halves(low, high, char)
    if kept:
        others.append(f"[{''.join(kept)}]")
    return None if not others else others[0] if len(others) == 1 else f"(?:{'|'.join(others)})"


def _members(inner: str) -> Iterator[tuple[str, str]]:
    """The members of a class: an item and "", or both ends of a range. Items that mean more in a class are escaped."""
    items = [found[0] for found in _MEMBER.finditer(inner)]
    place = 0
    while place < len(items):
        low, high = items[place], ""
        if items[place + 1 : place + 2] == ["-"] and place + 2 < len(items):
            high = items[place + 2]
        yield "\\" + low if low in "-]^[" else low, high
        place += 3 if high else 1


def _halves(low: str, high: str, char: str) -> list[str]:
    """A range of characters around one of them."""
    first, last, cut = _code(low), _code(high), ord(char)
    ranges = ((first, cut - 1), (cut + 1, last))
    return [f"\\u{begin:04x}-\\u{end:04x}" for begin, end in ranges if begin <= end]


def _code(item: str) -> int:
    if len(item) > 2:
        return int(item[2:], 16)
    return ord(
        {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}.get(item[1], item[1]) if len(item) == 2 else item
    )


def _escaped(char: str) -> str:
    return f"\\{char}" if char in "\\^-[]/|" else char
