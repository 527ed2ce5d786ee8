"""What a reference inside a user's schema points to: a JSON pointer (RFC 6901), an `$anchor`, or a schema that the
rewriter has changed. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.schema_merge import Schema

Pointer = str | tuple[Any, ...]
"""A reference as the user wrote it; or the one inside a tuple, which no user can spell: to what that schema has become
by a change."""

_OF_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords of an object whose keys are the user's names, whatever keyword they look like."""

_OF_DATA = frozenset(("enum", "const", "default", "examples"))


class Pointers:
    """Of one schema, which stays as it is."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._changed: dict[Pointer, Schema] = {}
        self._anchors: dict[str, Schema] | None = None

    def changed(self, pointer: Pointer, schema: Schema) -> Pointer:
        """The pointer to what the schema behind `pointer` has become."""
        self._changed[(pointer,)] = schema
        return (pointer,)

    def resolve(self, pointer: Any, where: str) -> Any:
        """What stands there.

        Args:
            pointer: a `Pointer`, or whatever the user wrote as one.
            where: the schema that holds the reference, for errors.

        Raises:
            GrammarError: nothing does.
        """
        if isinstance(pointer, tuple):
            return self._changed[pointer]
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise GrammarError(f"{where}/$ref: {pointer!r} is not inside this schema; only #... can be followed")
        if pointer[1:] and pointer[1] != "/":
            return self._anchor(pointer, where)
        node = self._schema
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            elif isinstance(node, dict) and step in node:
                node = node[step]
            else:
                raise GrammarError(f"{where}/$ref: there is no {pointer} in this schema")
        return node

    def _anchor(self, pointer: str, where: str) -> Any:
        """The schema that has this name as its `$anchor`."""
        if self._anchors is None:
            self._anchors = dict(_anchors(self._schema))
        if unquote(pointer[1:]) not in self._anchors:
            raise GrammarError(f"{where}/$ref: no schema inside this one has the $anchor {pointer[1:]!r}")
        return self._anchors[unquote(pointer[1:])]


def place_of(pointer: Pointer) -> str:
    """As the user wrote it, for errors."""
    while isinstance(pointer, tuple):
        pointer = pointer[0]
    return pointer


def _anchors(node: Any, is_of_names: bool = False) -> Iterator[tuple[str, Schema]]:
    """Names of schemas, the first of a name last."""
    if isinstance(node, dict):
        for key in reversed(node):
            if is_of_names or key not in _OF_DATA:
                yield from _anchors(node[key], not is_of_names and key in _OF_NAMES)
        if isinstance(node.get("$anchor"), str) and not is_of_names:
            yield node["$anchor"], node
    elif isinstance(node, list):
        for each in reversed(node):
            yield from _anchors(each)
