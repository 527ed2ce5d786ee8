"""Chat messages: wire types, and the plain dicts a chat template reads. Text only so far."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.text.messages import Content, in_parts
from tokenspeed.text.parsers.model_json import json_object

_OTHER_MEDIA = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "video",
        "video_url",
        "audio",
        "audio_url",
        "input_audio",
        "file",
        "input_file",
    }
)


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content. `prompt_cache_breakpoint` changes nothing: every prefix is cached."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A part of an assistant's content that another server marked as a refusal; text like any other for the model."""

    refusal: str


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`arguments` is a JSON object written as a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call the assistant made in an earlier turn."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message.

    Fields:
        content: text or a list of text parts; null only for an assistant. refusal: an assistant's, instead of content.
        name: of the speaker, for templates that show it.
        tool_calls: assistant only. tool_call_id: role tool only.
        reasoning_content, reasoning: two names of an assistant's earlier reasoning, for templates that show it.
        annotations, audio, function_call: what answers carry and clients send back; only null or empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


def check_media(messages: Any) -> None:
    """Refuse images, calls of other tools than functions and the like by name, before types are looked at.

    Raises:
        InvalidRequest: a content part of another kind than text, a call of another kind than function, or a message of
            the role that tools had before there were calls.
    """
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        _check_calls(message, f"messages[{number}]")
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _OTHER_MEDIA:
                where = f"messages[{number}].content[{place}]"
                raise InvalidRequest(
                    f"{where} is of type {kind!r}; this model takes text only", param=where, code="unsupported_content"
                )


def _check_calls(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        return
    if message.get("role") == "function":
        raise InvalidRequest(
            f"{where}.role is 'function', which came before tool calls; send role tool with tool_call_id",
            param=f"{where}.role",
            code="unsupported_content",
        )
    calls = message.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict) and call.get("type") == "custom":
            at = f"{where}.tool_calls[{place}]"
            raise InvalidRequest(
                f"{at} is of type 'custom'; there are only calls of functions",
                param=f"{at}.type",
                code="unsupported_content",
            )


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: content as text or parts, `developer` as `system`, call arguments as objects.

    Raises:
        InvalidRequest: no message, content or a field where its role has none, arguments that are not a JSON object.
    """
    if not messages:
        raise InvalidRequest("messages is empty, it must hold at least one message", param="messages")
    return [_to_template(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _to_template(message: Message, where: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is null, a {message.role} message needs text", param=f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls is only for role assistant", param=f"{where}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{where}.tool_call_id is only for role tool", param=f"{where}.tool_call_id")
    if message.annotations:
        raise InvalidRequest(f"{where}.annotations cannot be used: it must be empty", param=f"{where}.annotations")
    _check_refusals(message, where)
    result: dict[str, Any] = {
        # Families served here have no developer role of their own; OpenAI defines it as the newer system role.
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message.content) or message.refusal or "",
    }
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.reasoning_content is only for role assistant", param=where)
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _call_to_template(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    return result


def _check_refusals(message: Message, where: str) -> None:
    """Only an assistant refuses, and in one place: `refusal` comes instead of content."""
    if message.role != "assistant" and message.refusal is not None:
        raise InvalidRequest(f"{where}.refusal is only for role assistant", param=f"{where}.refusal")
    if message.content and message.refusal:
        raise InvalidRequest(
            f"{where} has content and a refusal; an answer is one of them, send it as content", param=f"{where}.refusal"
        )
    for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, RefusalPart) and message.role != "assistant":
            at = f"{where}.content[{place}]"
            raise InvalidRequest(f"{at} is of type refusal, which is only for role assistant", param=at)


def _content(content: str | list[TextPart | RefusalPart] | None) -> Content | None:
    if not isinstance(content, list):
        return content
    return in_parts([part.text if isinstance(part, TextPart) else part.refusal for part in content])


def _call_to_template(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = json_object(call.function.arguments or "{}")
    if arguments is None:
        where = f"{where}.function.arguments"
        raise InvalidRequest(f"{where} must be a JSON object written as a string", param=where)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
