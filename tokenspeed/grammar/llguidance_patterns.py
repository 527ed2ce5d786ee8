"""Patterns of a JSON schema, so that llguidance holds them inside JSON strings. Knows the library only by its bugs.

Measured with llguidance 1.9.1: a part of a pattern that takes all 32 control characters lets every escape in, those of
the quote and the backslash, too: `^[^"]+$` wrote `"\\""`. Without the character 0 such a part is taken as it is meant,
also where the library makes one of several (`[\\x00-!]|[#-~]`).
"""

from __future__ import annotations

import re
from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import NamePattern

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class."""

_OF_NAMES = ("properties", "$defs")


def held_in_strings(schema: Any) -> Any:
    """A rewritten schema with such patterns.

    Raises:
        GrammarError: a class that cannot be written in another way.
    """
    if isinstance(schema, list):
        return [held_in_strings(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    done: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            value = _without_zero(value)
        elif key == "patternProperties":
            value = {_without_zero(pattern): held_in_strings(each) for pattern, each in value.items()}
        elif key in _OF_NAMES:
            value = {name: held_in_strings(each) for name, each in value.items()}
        elif key not in ("enum", "const"):
            value = held_in_strings(value)
        done[key] = value
    return done


def _without_zero(pattern: str) -> str:
    return _PART.sub(_part_without_zero, pattern)


def _part_without_zero(found: re.Match[str]) -> str:
    part = found[0]
    if part[0] != "[" or not _is_misread(part):
        return part
    if part[1] != "^" or part[2] == "]":
        raise GrammarError(
            f"llguidance would write quotes and backslashes for {part[:80]!r}, which holds the character 0 without "
            "them; leave the character 0 out"
        )
    return rf"[^\x00{part[2:]}"


def _is_misread(part: str) -> bool:
    """It takes the character 0, and not both of those that would come in with it."""
    return any(
        each.fullmatch("\0") and not (each.fullmatch('"') and each.fullmatch("\\"))
        for each in NamePattern(part, Budget()).characters()
    )
