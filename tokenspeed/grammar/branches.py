"""A rewritten schema of one value, apart by the JSON type of the value: for formats that spell types in their own ways.
No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.text.parsers.typed_arguments import Kind

_FREE: Mapping[str, Mapping[str, Any]] = {
    "array": {"type": "array", "items": {}},
    "object": {"type": "object", "additionalProperties": {}},
}
_ANY: tuple[Kind, ...] = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Branch:
    """The values of one type.

    Fields:
        kind: the type.
        schema: theirs, complete with what it refers to.
        values: all of them, where the schema lists them; else None.
    """

    kind: Kind
    schema: Mapping[str, Any]
    values: list[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Every value of the type is one."""
        return self.values is None and self.schema in ({"type": self.kind}, _FREE.get(self.kind))


def branches_of(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None) -> list[Branch]:
    """The branches of a schema that `json_schema` has rewritten; several of one type where it has several.

    Args:
        definitions: `$defs` of the schema around.
    """
    found: list[Branch] = []
    seen: set[str] = set()
    waiting: list[Mapping[str, Any]] = [schema]
    while waiting:
        node = waiting.pop(0)
        reference = node.get("$ref")
        if reference is not None:
            if reference not in seen and definitions is not None:
                seen.add(reference)
                waiting.insert(0, definitions[reference.rpartition("/")[2]])
        elif "anyOf" in node:
            waiting[:0] = node["anyOf"]
        elif "enum" in node:
            kinds = dict.fromkeys(map(_kind_of, node["enum"]))
            for kind in kinds:
                values = [value for value in node["enum"] if _kind_of(value) == kind]
                found.append(Branch(kind, {"enum": values}, values))
        elif "type" not in node:
            found += [Branch(kind, _FREE.get(kind, {"type": kind})) for kind in _ANY]
        else:
            found.append(Branch(node["type"], _complete(node, definitions)))
    return found


def _complete(node: Mapping[str, Any], definitions: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {**node, "$defs": definitions} if '"$ref"' in json.dumps(node) else node


def _kind_of(value: Any) -> Kind:
    names: dict[type, Kind] = {
        bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
    }  # fmt: skip
    return names.get(type(value), "null")
