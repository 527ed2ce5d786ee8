"""An enum or a const beside other keywords: the values that obey them all. No torch."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb
from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.format_patterns import FORMAT_PATTERNS
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import NamePattern
from tokenspeed.grammar.patterns import MAX_CHARS, check_pattern
from tokenspeed.grammar.schema_merge import EmptySchema, Schema, same_json
from tokenspeed.grammar.schema_strings import READ_STEPS
from tokenspeed.grammar.schema_types import CALENDAR, FAMILIES, FORMATS, MAX_NUMBER, types_of
from tokenspeed.protocol.echo import json_type

MAX_ENUM = 1000
MAX_UNIQUE = 6  # values of an array that holds none twice: twice as many alternatives for each
_ITEM_CHARS = 32  # around each value of such an array


def values_of(node: Schema, where: str, budget: Budget) -> Any:
    """An enum or a const, as the enum of the values that fit the type and the other keywords; False when none does."""
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list) or not values:
        raise GrammarError(f"{where}/enum: a list of values is expected")
    if len(values) > MAX_ENUM:
        raise GrammarError(f"{where}/enum: {len(values)} values, the limit is {MAX_ENUM}")
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise GrammarError(f"{where}/enum: {str(value)[:40]}... is beyond {MAX_NUMBER}; write it as a string")
    if "enum" in node and "const" in node:
        values = [value for value in values if same_json(value, node["const"])]
    if "pattern" in node:
        _check_pattern(node["pattern"], where, budget)
    budget.spend(len(values))
    for key in node:
        if key not in ("enum", "const", "type"):
            pattern = _pattern_of(key, node[key], budget)
            budget.spend(len(values))
            values = [value for value in values if _obeys(value, key, node[key], pattern, where)]
    if "type" in node:
        types = types_of(node, where) or []
        values = [value for value in values if any(_has_type(value, name) for name in types)]
    return {"enum": values} if values else False


def unique_arrays(own: Schema, items: Any, where: str, budget: Budget) -> Schema:
    """Arrays that hold no value twice: of a few known values, in their order.

    Args:
        own: an array's rewritten keywords.
        items: the rewritten schema of its items.
        budget: what the arrays are charged to before they are made.

    Raises:
        EmptySchema: there are fewer values than `minItems`.
        GrammarError: the values are not known, or too many; the budget is spent.
    """
    values = _all_values(items) if isinstance(items, dict) else None
    if values is None or "prefixItems" in own:
        raise GrammarError(
            f"{where}/uniqueItems: it cannot be enforced, except of at most {MAX_UNIQUE} values in an enum; leave it "
            "out or set it to false"
        )
    least, most = own.get("minItems", 0), min(own.get("maxItems", MAX_UNIQUE), len(values))
    if least > most:
        raise EmptySchema(f"{where}: minItems {least} is above the {most} different items there can be")
    sizes = range(least, most + 1)
    num_items = sum(size * comb(len(values), size) for size in sizes)
    each_chars = sum(len(json.dumps(value)) for value in values) // len(values) + _ITEM_CHARS
    budget.spend(num_items * each_chars // 8)  # each value stands in as many arrays as any other
    return {"anyOf": [_array_of(each) for size in sizes for each in combinations(values, size)]}


def _all_values(schema: Schema) -> list[Any] | None:
    """All values of a rewritten schema, each once; None: they are not known, or more than `MAX_UNIQUE`."""
    if schema.get("type") == "boolean":
        return [False, True]
    found: list[Any] = []
    for value in schema.get("enum", ()):
        if not any(same_json(value, each) for each in found):
            found.append(value)
    return found if 0 < len(found) <= MAX_UNIQUE else None


def _array_of(values: tuple[Any, ...]) -> Schema:
    """The array of these values alone."""
    if not values:
        return {"type": "array", "items": {}, "maxItems": 0}
    items = [{"enum": [value]} for value in values]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _check_pattern(pattern: Any, where: str, budget: Budget) -> None:
    """As of a string without an enum: what is refused there is not looked for in values, either."""
    if not isinstance(pattern, str):
        raise GrammarError(f"{where}/pattern: a regular expression is a string, not {json_type(pattern)}")
    budget.spend(READ_STEPS * min(len(pattern), MAX_CHARS))
    try:
        check_pattern(pattern)
        NamePattern(pattern, Budget())
    except GrammarError as error:
        raise GrammarError(f"{where}/pattern: {error}") from None


def _pattern_of(key: str, said: Any, budget: Budget) -> NamePattern | None:
    """What the keyword asks of the characters of a string, if anything."""
    pattern = said if key == "pattern" else ""
    if key == "format":
        pattern = CALENDAR.get(said) or (f"^(?:{FORMAT_PATTERNS[said]})$" if said in FORMATS else "")
    budget.spend(READ_STEPS * len(pattern))
    return NamePattern(pattern, budget) if pattern else None


def _obeys(value: Any, key: str, said: Any, pattern: NamePattern | None, where: str) -> bool:
    """Whether a value obeys one keyword. One for another type says nothing about it.

    Args:
        pattern: of the keyword; see `_pattern_of`.

    Raises:
        GrammarError: that is not looked into.
    """
    family = next(name for name, keywords in FAMILIES.items() if key in keywords)
    if not _has_type(value, family):
        return True
    match key:
        case "minLength":
            return len(value) >= int(said)
        case "maxLength":
            return len(value) <= int(said)
        case "pattern" | "format":
            return pattern is None or pattern.is_in(value)
        case "minimum":
            return bool(value >= said)
        case "maximum":
            return bool(value <= said)
        case "exclusiveMinimum":
            return bool(value > said)
        case "exclusiveMaximum":
            return bool(value < said)
    raise GrammarError(f"{where}/{key}: not beside an enum or const of such values; list only the values that fit")


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and isinstance(value, int | float) and float(value).is_integer()
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
    return isinstance(value, {"string": str, "array": list, "object": dict}[name])
