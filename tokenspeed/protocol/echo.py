"""How an error's message shows what a client sent: in JSON's words, and never more of it than a line."""

from __future__ import annotations

from typing import Any

MAX_ECHO_CHARS = 80
MAX_MESSAGE_CHARS = 2000


def json_type(value: Any) -> str:
    """What JSON calls a value's type, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case _:
            return "an object"


def cut(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """The text; of a long one both ends, for a message's end is its remedy."""
    if len(text) <= limit:
        return text
    tail = (limit - 5) // 3
    return f"{text[: limit - 5 - tail]} ... {text[-tail:]}"


def echo(value: Any) -> str:
    """A value as Python spells it, cut."""
    if isinstance(value, str):
        value = value[: 2 * MAX_ECHO_CHARS] if len(value) > 2 * MAX_ECHO_CHARS else value
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    elif isinstance(value, dict | list):
        return json_type(value)
    return cut(repr(value))
