"""The schema of a forced tool call: a JSON array of `{"name": ..., "parameters": {...}}`. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec


def tool_choice_schema(
    tools: Sequence[dict[str, Any]],
    choice: str | None,
    parallel: bool,
    starts_after: tuple[int, ...] | None = None,
) -> GrammarSpec:
    """What an answer of only calls has to obey.

    Args:
        tools: OpenAI's shape: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: the name of the one tool to call (exactly once), or None = any of them ("required").
        parallel: with None: several calls are allowed.
        starts_after: see `GrammarSpec`.

    Raises:
        InvalidRequest: no tool of this name, or parameters that cannot be compiled.
    """
    functions = [tool["function"] for tool in tools]
    if choice is not None:
        functions = [function for function in functions if function["name"] == choice]
    if not functions:
        known = ", ".join(repr(tool["function"]["name"]) for tool in tools) or "none"
        raise InvalidRequest(f"tool_choice names {choice!r}, which is not among tools: {known}", param="tool_choice")
    definitions: dict[str, Any] = {}
    calls = []
    for place, function in enumerate(functions):
        parameters = _object_only(function)
        root = f"#/$defs/tool{place}"
        # Rewritten alone: references inside are read from its own root.
        try:
            definitions[f"tool{place}"] = rewrite_schema(parameters, "tools", root)
        except InvalidRequest as error:
            said = f"the parameters of the tool {function['name']!r}: {error.message}"
            raise InvalidRequest(said, param=error.param, code=error.code) from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [function["name"]]}, "parameters": {"$ref": root}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls} if len(calls) > 1 else calls[0], "minItems": 1}
    if choice is not None or not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = definitions
    return GrammarSpec(kind="json_schema", text=json.dumps(schema), starts_after=starts_after, param="tools")


def _object_only(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object."""
    parameters: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"tools: {function['name']}: parameters.type is {kind!r}; arguments are an object, so it must be 'object'",
            param="tools",
            code="invalid_schema",
        )
    return {**parameters, "type": "object"}
