"""Parts of structural tags: the few shapes that grammars of calls are put together from. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Form = dict[str, Any]
"""A part of a structural tag."""

MAX_WHITESPACE = 16
"""Characters of white space between two JSON tokens inside of tags."""


def json_form(schema: Mapping[str, Any]) -> Form:
    """JSON by a schema that `json_schema` has rewritten."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def text_form(text: str) -> Form:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def regex_form(pattern: str) -> Form:
    """Text that matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def any_text(*excluded: str) -> Form:
    """Any text in which none of these stands."""
    return {"type": "any_text", "excludes": list(excluded)}


def sequence(*parts: Form) -> Form:
    """One behind the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(forms: Sequence[Form]) -> Form:
    """One of several."""
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def optional(form: Form) -> Form:
    """Once or not at all."""
    return {"type": "optional", "content": form}


def listed(item: Form, separator: str) -> Form:
    """One or more, with text between that matches `separator`."""
    return sequence(item, repeated(sequence(regex_form(separator), item)))


def repeated(form: Form) -> Form:
    """Any number of times."""
    return {"type": "star", "content": form}
