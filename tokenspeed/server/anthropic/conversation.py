"""Anthropic's messages to what a chat template sees."""

from __future__ import annotations

from typing import Any

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.anthropic.blocks import (
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tokenspeed.server.anthropic.request import InputMessage, PromptFields, Tool
from tokenspeed.server.carried import unpack
from tokenspeed.server.openai.tools import check_tool_names
from tokenspeed.text.messages import Content, text_or_parts

# A header that some clients write as the first system block, another one for every request. Read by a model it would
# say nothing, and no prompt's prefix would ever be found in the cache.
_HEADER_BLOCK = "x-anthropic-billing-header:"

ChatMessage = dict[str, Any]


def to_messages(body: PromptFields) -> list[ChatMessage]:
    """The conversation as a chat template sees it.

    Raises:
        InvalidRequest: no messages, a block where its role has none, a tool_result without its tool_use, or a
            second tool_use or tool_result of one id.
    """
    if not body.messages:
        raise InvalidRequest("messages is empty, it must hold at least one message", param="messages")
    messages = _system(body.system)
    calls_so_far: dict[str, bool] = {}  # id of a call -> it has a result
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message, where, calls_so_far))
        else:
            messages += _others(message, where, calls_so_far)
    return messages


def chat_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools in the shape of chat completions, which templates and parsers read.

    Raises:
        InvalidRequest: too many, or two of one name.
    """
    check_tool_names([tool.name for tool in tools])
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description is not None else {}),
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    ]


def _system(system: str | list[TextBlock] | None) -> list[ChatMessage]:
    if isinstance(system, list):
        system = "\n\n".join(block.text for block in system if not block.text.startswith(_HEADER_BLOCK))
    return [{"role": "system", "content": system}] if system else []


def _assistant(message: InputMessage, where: str, calls_so_far: dict[str, bool]) -> ChatMessage:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thinking.append(block.thinking or unpack(block.signature) or "")
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                if block.id in calls_so_far:
                    raise _second(f"{where}.content[{place}]", "id", "tool_use", block.id)
                calls_so_far[block.id] = False
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(f"{where}.content[{place}]", "tool_result", "user")
    result: ChatMessage = {"role": "assistant", "content": text_or_parts(texts)}
    if any(thinking):
        result["reasoning_content"] = "\n".join(thinking)
    if calls:
        result["tool_calls"] = calls
    return result


def _others(message: InputMessage, where: str, calls_so_far: dict[str, bool]) -> list[ChatMessage]:
    """A user's or system message: tool results are messages of their own, in the order of the blocks."""
    result: list[ChatMessage] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            result.append({"role": message.role, "content": text_or_parts(texts)})
            texts.clear()

    for place, block in enumerate(message.content):
        at = f"{where}.content[{place}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if message.role != "user":
                    raise _misplaced(at, "tool_result", "user")
                if block.tool_use_id not in calls_so_far:
                    raise InvalidRequest(
                        f"{at}: there is no tool_use with id {block.tool_use_id[:100]!r} before its result",
                        param=f"{at}.tool_use_id",
                    )
                if calls_so_far[block.tool_use_id]:
                    raise _second(at, "tool_use_id", "tool_result", block.tool_use_id)
                calls_so_far[block.tool_use_id] = True
                flush()
                result.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
            case ThinkingBlock():
                raise _misplaced(at, "thinking", "assistant")
            case RedactedThinkingBlock():
                raise _misplaced(at, "redacted_thinking", "assistant")
            case _:
                raise _misplaced(at, "tool_use", "assistant")
    flush()
    if not result:
        raise InvalidRequest(f"{where}.content is empty, it must hold at least one block", param=f"{where}.content")
    return result


def _result(block: ToolResultBlock) -> Content:
    texts = [block.content] if isinstance(block.content, str) else [part.text for part in block.content]
    if block.is_error:
        texts = ["Error: " + "".join(texts[:1]), *texts[1:]]
    return text_or_parts(texts)


def _second(where: str, field: str, kind: str, call_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: there is already a {kind} of {field} {call_id[:100]!r}; a call has one id and one result",
        param=f"{where}.{field}",
    )


def _misplaced(where: str, kind: str, role: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is of type {kind}, which only a message of role {role} holds", param=where)
