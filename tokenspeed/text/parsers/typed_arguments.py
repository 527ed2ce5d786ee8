"""Arguments of the tag formats (qwen_coder, glm45, DSML, XTML): text values, made JSON by the tool's schema.

Values that can only be strings go out as they come. All others are kept until they are complete, since their type
decides how they are written (`True` -> `true`, `007` -> `7`); a value that fits none of its types stays a string. A
parameter that comes twice makes the call malformed: the first value is on its way by then.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.model_json import read_json
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.python_literal import literal

Kind = Literal["null", "boolean", "integer", "number", "array", "object", "string"]
Kinds = frozenset[Kind]

STRING: Kinds = frozenset(("string",))
ANY: Kinds = frozenset(get_args(Kind))
NOT_STRING: Kinds = ANY - STRING

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_MAX_REF_DEPTH = 32


def dumps(value: Any) -> str:
    """JSON text, as the room writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class ValueEnd:
    """What a value ends with: `own`, its closing tag, which is consumed, or where the model has forgotten that, the
    next tag, which is not. So no value holds one of these."""

    def __init__(self, own: str, *next_tags: str) -> None:
        self.own = own
        self.next_tags = next_tags
        self.markers = Markers(own, *next_tags)


class ObjectWriter:
    """Writes the open call's arguments as a JSON object, member by member."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._keys: set[str] = set()

    def close(self) -> None:
        """The object and the call are complete."""
        self._output.arguments("}" if self._keys else "{}")
        self._output.end()

    def member(self, cursor: Cursor, key: str, kinds: Kinds, end: ValueEnd, line: bool = False) -> Steps[bool]:
        """Read a value up to and with its end and write it under `key`; False when the text ended inside it, or the
        key is there already: the call is given up then.

        Args:
            kinds: the types that the value may have.
            line: the value stands on lines of its own: one newline at either end is markup. One in front of the next
                tag always is.
        """
        if key in self._keys:
            self._output.abandon()
            return False
        head = (", " if self._keys else "{") + dumps(key) + ": "
        self._keys.add(key)
        if line:
            yield from cursor.literal("\n")
        if kinds == STRING:
            self._output.arguments(head + '"')
            sink = _StringBody(self._output)
            found = yield from cursor.until(end.markers, sink.add, drop_tail=True, leave=end.next_tags)
            if found is not None:
                sink.end(keeps_newline=found == end.own and not line)
                self._output.arguments('"')
            return found is not None
        parts: list[str] = []
        found = yield from cursor.until(end.markers, parts.append, leave=end.next_tags)
        if found is None:
            return False
        text = "".join(parts)
        text = text if found == end.own and not line else text.removesuffix("\n")
        self._output.arguments(head + json_text(text, kinds))
        return True


class _StringBody:
    """Escapes a string value; holds back a newline at the end, which may be markup."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._output.arguments(dumps(text.removesuffix("\n"))[1:-1])

    def end(self, keeps_newline: bool) -> None:
        if keeps_newline:
            self._output.arguments(dumps(self._held)[1:-1])


def member_kinds(parameters: Mapping[str, Any] | None, key: str) -> Kinds:
    """The types that a schema allows for one parameter; empty when it says nothing."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping) or parameters is None:
        return frozenset()
    return _kinds(properties.get(key), parameters, 0)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Kinds:
    if not isinstance(schema, Mapping) or depth > _MAX_REF_DEPTH:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_resolve(reference, root), root, depth + 1)
    if (declared := schema.get("type")) is not None:
        names = declared if isinstance(declared, list) else [declared]
        return frozenset(name for name in names if name in ANY)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(union), list):
            return frozenset().union(*(_kinds(part, root, depth + 1) for part in parts))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_kind_of(value) for value in values)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """A JSON pointer into the tool's own schema; None for anything else."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _kind_of(value: Any) -> Kind:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_text(text: str, kinds: Kinds) -> str:
    """The JSON text of a value that may be of `kinds` (empty: any text is a string).

    Where a string is allowed too, only exact JSON spellings count as another type, so that `007` keeps its zeros.
    """
    exact = "string" in kinds
    plain = text.strip()
    for kind in get_args(Kind):
        if kind in kinds and kind != "string":
            found = _read(plain, kind, exact)
            if found is not None:
                return found
    return dumps(text)


def _read(plain: str, kind: Kind, exact: bool) -> str | None:
    if kind == "null":
        return "null" if plain in ("null", "None") else None
    if kind == "boolean":
        lower = plain.lower()
        return lower if lower in ("true", "false") else None
    if kind in ("integer", "number"):
        return _number(plain, kind == "integer", exact)
    return _container(plain, list if kind == "array" else dict)


def _number(plain: str, whole: bool, exact: bool) -> str | None:
    if (_INTEGER if whole else _NUMBER).fullmatch(plain):
        return plain
    if exact:
        return None
    try:
        value = float(plain)
        if not math.isfinite(value):
            return None
        # Through int where possible: a float would round long numbers.
        return (
            str(int(plain))
            if re.fullmatch(r"[+-]?\d+", plain)
            else str(int(value))
            if value.is_integer()
            else (None if whole else repr(value))
        )
    except ValueError:
        return None


def _container(plain: str, wanted: type) -> str | None:
    """JSON as the model wrote it, or a Python literal rewritten."""
    if not plain.startswith(("[", "(") if wanted is list else "{"):
        return None
    try:
        value = read_json(plain)
        return plain if isinstance(value, wanted) else None
    except ValueError:
        pass
    try:
        value = literal(plain)
        return dumps(value) if isinstance(value, wanted) else None
    except (ValueError, RecursionError):
        return None
