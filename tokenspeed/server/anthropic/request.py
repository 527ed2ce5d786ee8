"""The request of `/v1/messages`: its wire types, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.anthropic.blocks import CacheControl, InputBlock, TextBlock
from tokenspeed.server.body import to_struct
from tokenspeed.server.openai.fields import ANYTHING, Int32, drop_refused
from tokenspeed.server.openai.tools import ToolName

FIELD_NAMES: Mapping[str, str] = {"stop": "stop_sequences", "prompt": "messages"}
"""What this API calls the fields that chat completions have."""

# (values that change nothing here, why any other is refused)
MESSAGES_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "billing_policy": ((None,), "nothing is billed"),
    "compaction": ((None,), "a conversation is not made shorter here; send what the model shall see"),
    "fallback_credit_token": ((None,), "nothing is billed"),
    "fallbacks": ((None, []), "there is one model"),
    "thread": ((None,), "messages are not stored here; send the whole conversation"),
    "container": ((None,), "there are no code containers"),
    "context_management": (
        (None, {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "nothing is cleared from a conversation here; send what the model shall see",
    ),
    "diagnostics": ((None,), "the usage tells how much of the prompt was cached"),
    "inference_geo": ((None,), "the server is where it is"),
    "mcp_servers": ((None, []), "tools are run by the client"),
    "service_tier": ((None, "auto", "standard_only"), "there is only the standard tier"),
    "speed": ((None, "standard"), "there is one speed"),
    "user_profile_id": ((None,), "there are no user profiles; metadata.user_id is taken"),
    "workspace_id": ((None,), "there are no workspaces"),
}
_CALLER: tuple[tuple[Any, ...], str] = ((None, {"type": "direct"}), "tools are called by the model alone")
_TOOLSET: tuple[tuple[Any, ...], str] = ((None,), "there are no toolsets; name the tool itself")
_BLOCK_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {"caller": _CALLER, "toolset_name": _TOOLSET}
_MESSAGE_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "clear_at": ((None,), "nothing is cleared from a conversation here; send what the model shall see"),
    "output_config": ((None,), "it is of the whole request"),
}
_TOOL_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "input_examples": (ANYTHING, "chat templates show a tool's schema and description"),
    "toolset_name": _TOOLSET,
}

_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. A last message of role assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. `input_schema` is a JSON schema.

    Fields:
        strict: the input obeys the schema: of forced calls (`tool_choice` any or tool) it always does, of others too,
            or the request is refused.
        eager_input_streaming: input is always streamed as it is written.
        defer_loading: changes nothing: there is no tool search, so the model is shown the tool at once.
    """

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: CacheControl = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice`. `name` is for type tool only."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`thinking`: the chat template's switch; "adaptive" leaves it as the model has it.

    Fields:
        budget_tokens: with enabled; thinking that has not ended by itself after so many tokens is closed.
        display: "omitted" answers thinking blocks without text.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer's text obeys a JSON schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`output_config`. `effort` goes to the chat template, where it has such a setting."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whose request it is. Changes nothing."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt; all that `/v1/messages/count_tokens` takes."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """A request for a message."""

    max_tokens: Int32
    metadata: Metadata | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: float | None = None
    top_k: Int32 | None = None


def parse(fields: dict[str, Any]) -> MessagesRequest:
    """The body as a typed request.

    Raises:
        InvalidRequest: an unknown, refused or malformed field.
    """
    body = to_struct(_plain(fields), MessagesRequest)
    _check(body)
    if body.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {body.max_tokens}, it must be at least 1", param="max_tokens")
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    if budget is not None and budget >= body.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget}, it must be less than max_tokens, {body.max_tokens}",
            param="thinking.budget_tokens",
        )
    return body


def parse_count(fields: dict[str, Any]) -> PromptFields:
    """The body of `/v1/messages/count_tokens`.

    Raises:
        InvalidRequest: an unknown, refused or malformed field.
    """
    body = to_struct(_plain(fields), PromptFields)
    _check(body)
    return body


def _check(body: PromptFields) -> None:
    choice = body.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name goes with type tool, and only with it", param="tool_choice.name")
    if choice is not None and choice.type != "none" and not body.tools:
        raise InvalidRequest(f"tool_choice is {choice.type}, and there are no tools", param="tool_choice")
    thinking = body.thinking
    if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise InvalidRequest(
            "thinking.budget_tokens goes with type enabled, and only with it", param="thinking.budget_tokens"
        )


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The body without neutral fields of features that are not here, and without null ones in blocks."""
    plain = dict(drop_refused(fields, MESSAGES_REFUSED))
    for number, tool in enumerate(plain["tools"] if isinstance(plain.get("tools"), list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise InvalidRequest(
                f"tools[{number}] is of type {kind[:80]!r}; only tools with an input_schema are offered, which the "
                "client runs itself",
                param=f"tools[{number}].type",
            )
    if isinstance(plain.get("tools"), list):
        plain["tools"] = [
            drop_refused(tool, _TOOL_REFUSED, where=f"tools[{number}]") if isinstance(tool, dict) else tool
            for number, tool in enumerate(plain["tools"])
        ]
    thinking = plain.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "between_tools":
        raise InvalidRequest(
            "thinking.type is 'between_tools', which is no switch of chat templates; it must be enabled, disabled or "
            "adaptive",
            param="thinking.type",
            code="unsupported_field",
        )
    if isinstance(plain.get("messages"), list):
        plain["messages"] = [_plain_message(item, f"messages[{n}]") for n, item in enumerate(plain["messages"])]
    if isinstance(plain.get("system"), list):
        plain["system"] = [_plain_block(item, f"system[{n}]", ("text",)) for n, item in enumerate(plain["system"])]
    return plain


def _plain_message(message: Any, where: str) -> Any:
    if not isinstance(message, dict):
        return message
    message = drop_refused(message, _MESSAGE_REFUSED, where=where)
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [_plain_block(block, f"{where}.content[{place}]", _BLOCKS) for place, block in enumerate(content)]
    return {**message, "content": blocks}


def _plain_block(block: Any, where: str, kinds: tuple[str, ...]) -> Any:
    if not isinstance(block, dict):
        return block
    kind = block.get("type")
    if isinstance(kind, str) and kind not in kinds:
        raise InvalidRequest(
            f"{where} is of type {kind[:80]!r}; this model takes text only (blocks of type {', '.join(kinds)})",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if block.get("citations"):
        raise InvalidRequest(f"{where}.citations cannot be used: it must be empty", param=f"{where}.citations")
    plain = {key: value for key, value in block.items() if value is not None and key != "citations"}
    if kind in ("tool_use", "tool_result"):
        plain = drop_refused(plain, _BLOCK_REFUSED, where=where)
    if kind == "tool_result" and isinstance(plain.get("content"), list):
        plain["content"] = [
            _plain_block(part, f"{where}.content[{place}]", ("text",)) for place, part in enumerate(plain["content"])
        ]
    return plain
