"""Keywords of a schema that hold no schemas: which there are, and their values checked and made exact. No torch.

Whether any value can obey them is told by `EmptySchema`.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.schema_merge import EmptySchema, Schema, type_names

MAX_DECIMALS = 6  # of a number between bounds
MAX_NUMBER = 2**63 - 1  # in bounds and lengths: what the libraries read numbers into

FORMATS = frozenset(
    (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
        "uri-template", "uuid", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip
"""Formats that are enforced; another is an annotation, as the standard has it, and says nothing."""

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
"""Days that there are: RFC 3339, appendix C for leap years."""

TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+){0,1}(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
CALENDAR = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{TIME}$"}
"""Formats of which xgrammar knows only the shape: it takes 31 days for any month. As patterns both libraries obey."""

STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ARRAY_KEYWORDS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
OBJECT_KEYWORDS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
FAMILIES = {
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "integer": NUMBER_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "object": OBJECT_KEYWORDS,
}
TYPES = frozenset(("string", "number", "integer", "array", "object", "boolean", "null"))


def types_of(node: Schema, where: str) -> list[str] | None:
    """The types a value may have. Without `type`, that of its keywords: a part of what is valid. None: any."""
    if "type" in node:
        types = type_names(node["type"])
        unknown = [name for name in types if name not in TYPES]
        if unknown or not types:
            raise GrammarError(
                f"{where}/type: {node['type']!r} is not a JSON type; they are {', '.join(sorted(TYPES))}"
            )
        return list(dict.fromkeys(name for name in types if name != "integer" or "number" not in types))
    asked = [name for name in ("string", "number", "array", "object") if any(key in node for key in FAMILIES[name])]
    if len(asked) > 1:
        raise GrammarError(f"{where}: keywords of {' and '.join(asked)} without a type; add type")
    return asked or None


def number_of(own: Schema, name: str, where: str) -> Schema:
    """The keywords of a number or integer, `name`."""
    for key, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GrammarError(f"{where}/{key}: a number is expected, not {json.dumps(value)}")
        if abs(value) > MAX_NUMBER:
            raise GrammarError(f"{where}/{key}: beyond {MAX_NUMBER}, which is the largest number that can be used")
    if name == "integer":
        for key, value in list(own.items()):
            if isinstance(value, float):
                up = key in ("minimum", "exclusiveMaximum")
                own[key] = math.ceil(value) if up else math.floor(value)
    _check_range(own, name, where)
    return own


def _check_range(own: Schema, name: str, where: str) -> None:
    """The library says of an empty range only that there is one; and where no number of its decimals fits, it takes an
    empty text for a number."""
    scale = 1 if name == "integer" else 10**MAX_DECIMALS
    lows: list[tuple[int, str]] = []
    highs: list[tuple[int, str]] = []
    for key, value in own.items():
        exact = Fraction(str(value)) * scale
        match key:
            case "minimum":
                lows.append((math.ceil(exact), key))
            case "exclusiveMinimum":
                lows.append((math.floor(exact) + 1, key))
            case "maximum":
                highs.append((math.floor(exact), key))
            case "exclusiveMaximum":
                highs.append((math.ceil(exact) - 1, key))
    if lows and highs and max(lows)[0] > min(highs)[0]:
        low, high = max(lows)[1], min(highs)[1]
        kind = name if name == "integer" else f"{name} of at most {MAX_DECIMALS} decimals"
        raise EmptySchema(f"{where}: no {kind} fits {low} {own[low]} and {high} {own[high]}")


def check_order(own: Schema, low: str, high: str, where: str) -> None:
    """Whether two keywords are counts, and the lower one not above the other."""
    for key in (low, high):
        if key in own and (isinstance(own[key], bool) or not isinstance(own[key], int) or own[key] < 0):
            raise GrammarError(f"{where}/{key}: a whole number of at least 0 is expected, not {json.dumps(own[key])}")
        if own.get(key, 0) > MAX_NUMBER:
            raise GrammarError(f"{where}/{key}: beyond {MAX_NUMBER}, which is the largest number that can be used")
    if low in own and high in own and own[low] > own[high]:
        raise EmptySchema(f"{where}: {low} {own[low]} is above {high} {own[high]}")


def check_count(own: Schema, num_named: int, num_required: int, is_closed: bool, where: str) -> None:
    """Whether the numbers of properties allow any object."""
    if own.get("maxProperties", num_required) < num_required:
        raise EmptySchema(
            f"{where}: maxProperties {own['maxProperties']} is below the {num_required} required properties"
        )
    if is_closed and own.get("minProperties", 0) > num_named:
        raise EmptySchema(
            f"{where}: minProperties {own['minProperties']} is above the {num_named} properties there can be"
        )
