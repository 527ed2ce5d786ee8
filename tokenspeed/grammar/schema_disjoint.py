"""Whether a value can match two of several schemas: where none can, `oneOf` is the same as `anyOf`. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.schema_merge import Schema, json_key, type_names


@dataclass(frozen=True, slots=True)
class _Profile:
    """What sets a schema apart from others.

    Fields:
        types: with integer as number; empty: unknown.
        constants: the values of required properties that have only some.
    """

    types: frozenset[str]
    constants: dict[str, frozenset[Hashable]]


def are_disjoint(schemas: Sequence[Schema], budget: Budget) -> bool:
    """True only when surely no value matches two of them.

    Raises:
        GrammarError: the budget is spent.
    """
    values: set[Hashable] = set()
    types_of_values: set[str] = set()
    others: list[_Profile] = []
    for schema in schemas:
        own = _constants(schema)
        budget.spend(1 + len(own))
        if not own:
            others.append(_profile(schema, budget))
            continue
        keys = {json_key(value) for value in own}
        if not values.isdisjoint(keys):
            return False
        values |= keys
        types_of_values |= {_type_name(value) for value in own}
    if types_of_values and any(not each.types or each.types & types_of_values for each in others):
        return False
    for place, first in enumerate(others):
        for second in others[place + 1 :]:
            if not _are_apart(first, second, budget):
                return False
    return True


def telling_names(schemas: Sequence[Schema], budget: Budget) -> list[list[str]]:
    """Of each schema, the properties whose value would set it apart from another one if they were required.

    Raises:
        GrammarError: the budget is spent.
    """
    constants: list[dict[str, frozenset[Hashable]]] = []
    for schema in schemas:
        properties = schema.get("properties", {})
        found = {name: _constants(each) for name, each in properties.items()} if isinstance(properties, dict) else {}
        budget.spend(1 + len(found))
        constants.append({name: frozenset(map(json_key, values)) for name, values in found.items() if values})
    told: list[list[str]] = []
    for own in constants:
        budget.spend(len(own) * len(constants))
        told.append(
            [
                name
                for name, values in own.items()
                if any(name in other and values.isdisjoint(other[name]) for other in constants if other is not own)
            ]
        )
    return told


def _are_apart(first: _Profile, second: _Profile, budget: Budget) -> bool:
    budget.spend(1 + len(first.constants))
    if first.types and second.types and not first.types & second.types:
        return True
    return any(
        name in second.constants and values.isdisjoint(second.constants[name])
        for name, values in first.constants.items()
    )


def _profile(schema: Schema, budget: Budget) -> _Profile:
    types = type_names(schema["type"]) if "type" in schema else []
    constants: dict[str, frozenset[Hashable]] = {}
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        values = _constants(properties.get(name))
        budget.spend(1 + len(values))
        if values:
            constants[name] = frozenset(map(json_key, values))
    return _Profile(frozenset("number" if name == "integer" else name for name in types), constants)


def _constants(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    values: list[Any] = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return values


def _type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
