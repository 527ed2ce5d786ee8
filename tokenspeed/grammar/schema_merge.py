"""Two JSON schemas that must both hold, as one. Refuses what has no exact common form. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tokenspeed.grammar.interface import GrammarError

Schema = dict[str, Any]


class EmptySchema(GrammarError):
    """A schema that no value can obey. Among alternatives it is left out; anywhere else it is a mistake to be told."""


ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable",
        "$comment", "$schema", "$id", "id", "$anchor", "$vocabulary", "contentEncoding", "contentMediaType",
        "contentSchema", "$defs", "definitions",
    )
)  # fmt: skip
"""Say nothing about which values are valid (`$defs` only keeps schemas to refer to)."""

_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def merge(first: Schema, second: Schema, where: str) -> Schema:
    """A schema that is valid for what both are valid for. Neither is changed.

    Args:
        where: for the error: the place in the user's schema.

    Raises:
        EmptySchema: no value is valid for both.
        GrammarError: names the keyword that cannot be combined.
    """
    _check_closed(first, second, where)
    _check_closed(second, first, where)
    merged = dict(first)
    for key, value in second.items():
        if key in ANNOTATIONS:
            merged.setdefault(key, value)
        elif key not in merged or same_json(merged[key], value):
            merged[key] = value
        elif key in _MERGERS:
            merged[key] = _MERGERS[key](merged[key], value, where)
        else:
            raise GrammarError(f"{where}: two values of {key} cannot be combined; write one schema")
    return merged


def same_json(first: Any, second: Any) -> bool:
    """Equality of JSON values: unlike Python's, true is not 1."""
    if first is second:
        return True
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_json(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_json, first, second))
    return bool(first == second)


def json_key(value: Any) -> Hashable:
    """Equal for two JSON values when `same_json` says so; for sets."""
    match value:
        case bool():
            return ("boolean", value)
        case dict():
            return ("object", frozenset((name, json_key(item)) for name, item in value.items()))
        case list():
            return ("array", tuple(map(json_key, value)))
    key: Hashable = value
    return key


def type_names(value: Any) -> list[str]:
    """`type` as a list."""
    return [value] if isinstance(value, str) else list(value)


def _check_closed(closed: Schema, other: Schema, where: str) -> None:
    """A schema that limits its further properties limits those of the other one, too."""
    if closed.get("additionalProperties", True) is True or closed["additionalProperties"] == {}:
        return
    new = set(other.get("properties", {})) - set(closed.get("properties", {}))
    if new or "patternProperties" in other:
        names = ", ".join(sorted(new)) or "patternProperties"
        raise GrammarError(
            f"{where}: additionalProperties of one schema does not know {names} of the other; write one object with "
            "all properties"
        )


def _types(first: Any, second: Any, where: str) -> list[str]:
    one, other = type_names(first), type_names(second)
    both = [name for name in one if name in other or (name == "integer" and "number" in other)]
    both += [name for name in other if name == "integer" and "number" in one and name not in both]
    if not both:
        raise EmptySchema(f"{where}: no value has type {first!r} and {second!r}")
    return both


def _properties(first: Schema, second: Schema, where: str) -> Schema:
    merged = dict(first)
    for name, schema in second.items():
        known = merged.get(name, True)
        merged[name] = schema if known is True else known if schema is True else _both(known, schema, f"{where}/{name}")
    return merged


def _both(first: Any, second: Any, where: str) -> Any:
    if first is False or second is False:
        return False
    return second if first is True else first if second is True else merge(first, second, where)


def _required(first: list[str], second: list[str], _where: str) -> list[str]:
    return list(dict.fromkeys((*first, *second)))


def _enum(first: list[Any], second: list[Any], where: str) -> list[Any]:
    others = {json_key(value) for value in second}
    both = [value for value in first if json_key(value) in others]
    if not both:
        raise EmptySchema(f"{where}: the two enums have no value in common")
    return both


_MERGERS: dict[str, Callable[[Any, Any, str], Any]] = {
    **{key: lambda first, second, _where: max(first, second) for key in _LARGEST},
    **{key: lambda first, second, _where: min(first, second) for key in _SMALLEST},
    "type": _types,
    "properties": _properties,
    "required": _required,
    "enum": _enum,
    "items": _both,
    "additionalProperties": _both,
    "allOf": lambda first, second, _where: [*first, *second],
}
