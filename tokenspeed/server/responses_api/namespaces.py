"""Functions inside namespaces (`{"type": "namespace", "name": ..., "tools": [...]}`, as agents send an MCP server's):
the one name by which a model knows each, and back.

Models and their formats of calls know flat names only, while clients look functions up by namespace and name: a call
item has both fields apart (OpenAI's reference: `function_call.namespace`).

    mcp__notes, read  ->  mcp__notes__read  ->  {"type": "function_call", "namespace": "mcp__notes", "name": "read"}

The way back is a table of this request's tools; the flat name alone could be cut in two places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.openai.tools import check_tool_names
from tokenspeed.server.responses_api.response import AllowedTools, FunctionTool, NamedFunction, NamedNamespace, Tool
from tokenspeed.server.turn import ToolChoice

_BETWEEN = "__"


@dataclass(frozen=True, slots=True)
class Function:
    """One function on offer.

    Fields:
        flat_name: by which the model knows it.
        namespace: None = it stands alone.
        description: what the model reads.
    """

    flat_name: str
    namespace: str | None
    tool: FunctionTool
    description: str | None


def flat_name(namespace: str | None, name: str) -> str:
    """The name that stands for both, the same whether or not the function is on offer (calls of earlier turns)."""
    if not namespace:
        return name
    return namespace + (name if namespace.endswith(_BETWEEN) else _BETWEEN + name)


def functions_of(tools: Sequence[Tool]) -> list[Function]:
    """All functions on offer. What a namespace says of itself is read before its first function's description.

    Raises:
        InvalidRequest: too many, two of one flat name, or one that only programs may call.
    """
    found: list[Function] = []
    for number, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            _check_callers(tool, f"tools[{number}]")
            found.append(Function(tool.name, None, tool, tool.description))
            continue
        about = f"(Of all {tool.name} functions: {tool.description})" if tool.description else None
        for place, inner in enumerate(tool.tools):
            _check_callers(inner, f"tools[{number}].tools[{place}]")
            said = [text for text in (about, inner.description) if text]
            found.append(Function(flat_name(tool.name, inner.name), tool.name, inner, "\n".join(said) or None))
            about = None
    check_tool_names([function.flat_name for function in found])
    return found


def namespaced(functions: Sequence[Function]) -> dict[str, tuple[str, str]]:
    """Flat name -> (namespace, name), of the functions that have a namespace."""
    return {each.flat_name: (each.namespace, each.tool.name) for each in functions if each.namespace is not None}


def choice_among(choice: object, functions: Sequence[Function]) -> ToolChoice:
    """`tool_choice` in neutral words and flat names.

    Raises:
        InvalidRequest: a name that stands in several namespaces.
    """
    match choice:
        case None:
            return ToolChoice()
        case NamedFunction():
            return ToolChoice("required", _chosen(choice, functions))
        case AllowedTools():
            names: set[str] = set()
            for each in choice.tools:
                if isinstance(each, NamedNamespace):
                    names |= _inside(each.name, functions)
                else:
                    names.add(_chosen(each, functions))
            return ToolChoice(choice.mode, allowed=frozenset(names))
        case "none" | "auto" | "required":
            return ToolChoice(choice)
    raise AssertionError(choice)


def _chosen(choice: NamedFunction, functions: Sequence[Function]) -> str:
    """The flat name; one that no function has is told by who looks for it."""
    namespace, name = choice.namespace, choice.name
    if isinstance(namespace, str):
        return flat_name(namespace, name)
    if any(each.flat_name == name for each in functions):
        return name
    inside = [each for each in functions if each.tool.name == name]
    if len(inside) > 1:
        where = ", ".join(repr(each.namespace) for each in inside)
        raise InvalidRequest(
            f"tool_choice names {echo(name)}, which stands in the namespaces {where}; send namespace beside name",
            param="tool_choice",
        )
    return inside[0].flat_name if inside else name


def _inside(namespace: str, functions: Sequence[Function]) -> set[str]:
    found = {each.flat_name for each in functions if each.namespace == namespace}
    if not found:
        raise InvalidRequest(
            f"tool_choice names the namespace {namespace[:100]!r}, which has no function among tools",
            param="tool_choice",
        )
    return found


def _check_callers(tool: FunctionTool, where: str) -> None:
    callers = tool.allowed_callers
    if isinstance(callers, list) and "direct" not in callers:
        raise InvalidRequest(
            f"{where}.allowed_callers must hold 'direct': there are no programs here that could call it",
            param=f"{where}.allowed_callers",
            code="unsupported_field",
        )


def split(name: str, names: Mapping[str, tuple[str, str]]) -> tuple[str | None, str]:
    """Namespace and name of what a model called."""
    return names.get(name, (None, name))
