"""Content blocks of `/v1/messages`, as they are sent and as they are answered. Wire types only.

`cache_control` is taken everywhere and changes nothing: every prompt's prefix is cached without being asked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

CacheControl = dict[str, Any] | None


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True):
    """Text."""

    text: str
    cache_control: CacheControl | msgspec.UnsetType = msgspec.UNSET


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True, forbid_unknown_fields=True):
    """The model's reasoning. With `display` "omitted" its text is only in the signature."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(
    msgspec.Struct, tag_field="type", tag="redacted_thinking", kw_only=True, forbid_unknown_fields=True
):
    """Reasoning that another server encrypted. Nobody here can read it, so it is left out. Never made here."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True, forbid_unknown_fields=True):
    """The model's wish to call a tool."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | msgspec.UnsetType = msgspec.UNSET


class AnsweredToolUse(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A call in an answer. `input` is what the model wrote: parsed and written again, 1e400 would be null."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True, forbid_unknown_fields=True):
    """What the tool gave. A result with `is_error` begins with "Error: " for the model."""

    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | msgspec.UnsetType = msgspec.UNSET


InputBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
OutputBlock = TextBlock | ThinkingBlock | AnsweredToolUse
