"""What is wrong with a schema that is none: the first keyword whose value has not the shape that JSON Schema asks for.

Asked only when reading it has failed. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenspeed.protocol.echo import cut, json_type

_Shape = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_SCHEMA: _Shape = ("a schema: an object or a boolean", lambda value: isinstance(value, dict | bool))
_SCHEMAS: _Shape = ("an array of schemas", lambda value: isinstance(value, list))
_BY_NAME: _Shape = ("an object whose values are schemas", lambda value: isinstance(value, dict))
_NUMBER: _Shape = ("a number", _is_number)
_TEXT: _Shape = ("a string", lambda value: isinstance(value, str))

_SHAPES: Mapping[str, _Shape] = {
    "type": ("a string or an array of strings", lambda value: isinstance(value, str) or _is_texts(value)),
    "enum": ("an array", lambda value: isinstance(value, list)),
    "required": ("an array of strings", _is_texts),
    "items": ("a schema or an array of schemas", lambda value: isinstance(value, dict | bool | list)),
    **dict.fromkeys(("$ref", "pattern", "format"), _TEXT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        ("a whole number of at least 0", lambda value: _is_number(value) and value >= 0 and value == int(value)),
    ),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _BY_NAME),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _SCHEMAS),
    **dict.fromkeys(("additionalProperties", "propertyNames", "not", "contains", "if", "then", "else"), _SCHEMA),
}


def malformed(schema: Any) -> str | None:
    """The place, what must be there and what is; None when all shapes are right."""
    pending: list[tuple[Any, str]] = [(schema, "#")]
    while pending:
        node, where = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            return f"{cut(where)} must be {_SCHEMA[0]}; it is {json_type(node)}"
        for key, value in node.items():
            if key in _SHAPES and not _SHAPES[key][1](value):
                wanted, found = _SHAPES[key][0], json_type(value)
                if found in wanted:
                    found += " of something else"
                return f"{cut(f'{where}/{key}')} must be {wanted}; it is {found}"
        pending += reversed(list(_inside(node, where)))
    return None


def _inside(node: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    for key, value in node.items():
        shape = _SHAPES.get(key)
        if shape is _BY_NAME:
            yield from ((each, f"{where}/{key}/{name}") for name, each in value.items())
        elif shape is _SCHEMAS or (key == "items" and isinstance(value, list)):
            yield from ((each, f"{where}/{key}/{place}") for place, each in enumerate(value))
        elif shape is _SCHEMA or key == "items":
            yield value, f"{where}/{key}"
