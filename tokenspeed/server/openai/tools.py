"""Tools in chat requests: wire types, and which of them may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.turn import ToolChoice

MAX_TOOLS = 1024

# What no format of calls needs for itself. OpenAI allows [a-zA-Z0-9_-]; agents have dots, colons and slashes, too.
ToolName = Annotated[str, Meta(pattern=r"^[^\s\"'<>{}\[\]()=,|]{1,128}(?!\n)$")]


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer.

    Fields:
        parameters: JSON schema of the arguments; none = no arguments are described.
        strict: arguments obey the schema: of forced calls (`tool_choice` required or a function) they always do, of
            others too, or the request is refused (docs/serving/reasoning-and-tools.md).
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool on offer; functions only."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function named."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """`tool_choice`: this function, once."""

    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`mode` as a tool choice, among these tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: only some of the tools. The prompt shows all of them, so that its prefix stays cached."""

    allowed_tools: AllowedTools


ToolChoiceField = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def check_kinds(fields: dict[str, Any]) -> None:
    """Refuse tools of other kinds than functions by name, before types are looked at.

    Raises:
        InvalidRequest: a tool, or a choice of one.
    """
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        _check_kind(tool, f"tools[{number}]", ("function",))
    _check_kind(choice, "tool_choice", ("function", "allowed_tools"))


def _check_kind(value: Any, where: str, kinds: tuple[str, ...]) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise InvalidRequest(
            f"{where} is of type {kind[:80]!r}; tools of type function are offered, which the client runs itself",
            param=f"{where}.type",
            code="unsupported_tool",
        )


def for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates know them: OpenAI's shape, in its usual order of keys, without `strict`.

    Raises:
        InvalidRequest: too many, or two of one name.
    """
    offered = tools or ()
    check_tool_names([tool.function.name for tool in offered])
    return [msgspec.to_builtins(Tool(type="function", function=_without_strict(tool.function))) for tool in offered]


def check_tool_names(names: Sequence[str]) -> None:
    """What any API asks of the tools of a request together; `ToolName` is what it asks of each.

    Raises:
        InvalidRequest: too many, or two of one name.
    """
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(names)} tools, the limit is {MAX_TOOLS}", param="tools")
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            raise InvalidRequest(f"tools holds two functions of the name {echo(name)}", param=f"tools[{number}]")
        seen.add(name)


def choice_of(field: ToolChoiceField | None, has_tools: bool) -> ToolChoice:
    """What may be called.

    Raises:
        InvalidRequest: a choice without tools.
    """
    if not has_tools:
        if field not in (None, "none"):
            raise InvalidRequest("tool_choice is only for requests with tools", param="tool_choice")
        return ToolChoice("none")
    match field:
        case NamedTool(function=function):
            return ToolChoice("required", name=function.name)
        case AllowedChoice(allowed_tools=allowed):
            return ToolChoice(allowed.mode, allowed=frozenset(tool.function.name for tool in allowed.tools))
        case None:
            return ToolChoice("auto")
    return ToolChoice(field)


def _without_strict(function: FunctionTool) -> FunctionTool:
    return function if function.strict is None else msgspec.structs.replace(function, strict=None)
