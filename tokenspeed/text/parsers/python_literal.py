"""Python literals to JSON: strings as they come, anything else once it is complete."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
import warnings
from typing import Any

from tokenspeed.text.parsers.cursor import Cursor, Markers, Sink, Steps
from tokenspeed.text.parsers.model_json import read_json

_QUOTES = ('"""', "'''", '"', "'")
_ENDS = {quote: Markers(quote, "\\") for quote in _QUOTES}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_NAME_END = Markers("}")
_MAX_NAME_CHARS = 100

_PLAIN = re.compile(r"[^\"'()\[\]{},]*")
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}


def string(cursor: Cursor, sink: Sink) -> Steps[bool]:
    """The string literal that is next (several in a row are one), as the inside of a JSON string. False: it was cut,
    which cannot be excluded before the character behind it is there."""
    while True:
        first = yield from cursor.peek(3)
        if len(first) < 3 and not first.strip("\"'"):
            return False
        for quote in _QUOTES:
            if (yield from cursor.literal(quote)):
                break
        else:
            return True
        if not (yield from _body(cursor, quote, sink)):
            return False
        yield from cursor.space()


def _body(cursor: Cursor, quote: str, sink: Sink) -> Steps[bool]:
    def escaped(text: str) -> None:
        # A surrogate can only come from an escape. It stays one: alone it cannot be encoded.
        sink("".join(json.dumps(char, ensure_ascii="\ud800" <= char <= "\udfff")[1:-1] for char in text))

    while True:
        end = yield from cursor.until(_ENDS[quote], lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]), True)
        if end is None:
            return False
        if end == quote:
            return True
        escape = yield from _escape(cursor)
        if escape is None:
            return False
        escaped(escape)


def _escape(cursor: Cursor) -> Steps[str | None]:
    """What stands behind a backslash, decoded; None when it was cut. Unknown escapes stay as they are."""
    char = yield from cursor.peek()
    if not char:
        return None
    yield from cursor.literal(char)
    if char in _HEX_DIGITS:
        return (yield from _digits(cursor, char, _HEX_DIGITS[char], "0123456789abcdefABCDEF", 16))
    if char in "01234567":
        return (yield from _octal(cursor, char))
    if char == "N" and (yield from cursor.peek()) in ("", "{"):
        yield from cursor.literal("{")
        name = yield from cursor.within(_NAME_END, _MAX_NAME_CHARS)
        if name is None:
            return None if cursor.ended else "\\N{"
        try:
            return unicodedata.lookup(name[0])
        except KeyError:
            return f"\\N{{{name[0]}}}"
    return "" if char == "\n" else _ESCAPES.get(char, "\\" + char)


def _digits(cursor: Cursor, char: str, count: int, alphabet: str, base: int) -> Steps[str | None]:
    digits = yield from cursor.peek(count)
    if len(digits) < count:
        return None
    if any(digit not in alphabet for digit in digits) or int(digits, base) > 0x10FFFF:
        return "\\" + char
    yield from cursor.literal(digits)
    return chr(int(digits, base))


def _octal(cursor: Cursor, digits: str) -> Steps[str | None]:
    while len(digits) < 3:
        char = yield from cursor.peek()
        if not char:
            return None
        if char not in "01234567":
            break
        yield from cursor.literal(char)
        digits += char
    return chr(int(digits, 8))


def expression(cursor: Cursor) -> Steps[str | None]:
    """The expression up to a comma or closing bracket that is not its own, as JSON; None: cut, or no literal."""
    parts: list[str] = []
    depth = 0
    while True:
        found = yield from cursor.run(_PLAIN, parts.append)
        if found == "":
            return None
        if found in "\"'":
            if not (yield from _skip_string(cursor, parts.append)):
                return None
            continue
        if depth == 0 and found in ",)]}":
            return to_json("".join(parts))
        depth += 1 if found in "([{" else -1 if found in ")]}" else 0
        yield from cursor.literal(found)
        parts.append(found)


def _skip_string(cursor: Cursor, sink: Sink) -> Steps[bool]:
    for quote in _QUOTES:
        if (yield from cursor.literal(quote)):
            break
    sink(quote)
    while True:
        end = yield from cursor.until(_ENDS[quote], sink)
        if end is None:
            return False
        sink(end)
        if end == quote:
            return True
        char = yield from cursor.peek()
        yield from cursor.literal(char)
        sink(char)


def to_json(source: str) -> str | None:
    """A literal (with JSON's `true`, `false`, `null` too) as JSON text; None when it is none. What is JSON stays as it
    is: it holds numbers that Python's types do not, and halves of characters that only together are one."""
    try:
        read_json(source)
        return source.strip()
    except ValueError:
        pass
    try:
        return json.dumps(literal(source), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def literal(source: str) -> Any:
    """The value of a literal, tuples as lists.

    Raises:
        ValueError: it is none.
    """
    try:
        with warnings.catch_warnings():
            # Python warns of odd spellings; the text is a model's, not code of ours.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a literal: {error}") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(node.op, ast.USub) else number
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if node is None:
        raise ValueError("** in a literal")
    value = _value(node)
    return value if isinstance(value, str) else json.dumps(value)
