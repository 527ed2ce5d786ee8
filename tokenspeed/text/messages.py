"""Chat messages as clients send them, brought to the one shape that chat templates expect.

Templates see: role, content as text or parts of type text (`template_content` chooses), no keys whose value is null,
tool-call arguments as objects, reasoning under `reasoning_content` (and `thinking`, which some templates read).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.protocol.echo import echo, json_type
from tokenspeed.protocol.errors import Field, InvalidRequest
from tokenspeed.text.parsers.model_json import read_json

Content = str | list[dict[str, str]]
"""Of a message: text, or parts of type text."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A new list; the caller's is not touched.

    Raises:
        InvalidRequest: no messages, a message without role, a part that is not text, arguments that are not JSON.
    """
    if not messages:
        raise InvalidRequest([Field("messages"), " is empty; send at least one message"], param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {json_type(message)}, it must be an object", param="messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} has no role; it must be a string such as 'user'", param="messages")
    known = {key: value for key, value in message.items() if value is not None}
    if "content" in known:
        known["content"] = _content(where, known["content"])
    if "tool_calls" in known:
        known["tool_calls"] = _tool_calls(where, known["tool_calls"])
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    if reasoning is not None:
        known = {"thinking": reasoning, **known, "reasoning_content": reasoning}
    return known


def in_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    """Texts as parts of a message's content, in the shape that templates know."""
    return [{"type": "text", "text": text} for text in texts]


def text_or_parts(texts: Sequence[str]) -> Content:
    """Content of any number of texts."""
    return in_parts(texts) if len(texts) > 1 else "".join(texts)


def joined(content: Content) -> str:
    """Content as one text: parts on lines of their own."""
    # Templates of the family do not say. vLLM and llama.cpp do so; without anything between, "File a:" and its text
    # would run together.
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _content(where: str, content: Any) -> Content:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(
            f"{where}.content is {json_type(content)}, it must be a string or a list of text parts",
            param="messages",
        )
    return in_parts([_part(f"{where}.content[{index}]", part) for index, part in enumerate(content)]) or ""


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind in (*_TEXT_PARTS, "refusal"):
        if not isinstance(text, str):
            raise InvalidRequest(f"{where} is of type {echo(kind)} but has no text in it", param="messages")
        return text
    raise InvalidRequest(f"{where} is of type {echo(kind)}; this model takes text parts only", param="messages")


def _tool_calls(where: str, calls: Any) -> list[Any]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where}.tool_calls is {json_type(calls)}, it must be a list", param="messages")
    return [_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} has no function; it must be an object with name and arguments", param="messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = read_json(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": parsed}}
