"""Reassembles a streamed chat completion, checking the order of its chunks, and brings whole ones to the same shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Message:
    """A choice's answer, however it came."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    finish_reason: str | None = None


def of_choice(choice: dict[str, Any]) -> Message:
    """From a choice of a whole completion."""
    message = choice["message"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    assert all(call["type"] == "function" for call in message.get("tool_calls") or ())
    assert message["content"] is not None or calls
    return Message(message["reasoning_content"] or "", message["content"] or "", calls, choice["finish_reason"])


def of_chunks(chunks: Iterable[dict[str, Any]]) -> dict[int, Message]:
    """From all chunks of a stream: role first, id and name only on a call's first delta, nothing behind the finish."""
    messages: dict[int, Message] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(messages, choice)
    assert all(message.finish_reason is not None for message in messages.values())
    return messages


def _add(messages: dict[int, Message], choice: dict[str, Any]) -> None:
    delta, index = choice["delta"], choice["index"]
    if index not in messages:
        assert delta == {"role": "assistant", "content": ""}
        messages[index] = Message()
        return
    message = messages[index]
    assert message.finish_reason is None, "a chunk behind the finish"
    assert "role" not in delta
    assert len(delta) == (0 if choice["finish_reason"] else 1), "one kind a chunk"
    message.reasoning += delta.get("reasoning_content", "")
    message.content += delta.get("content", "")
    for part in delta.get("tool_calls", ()):
        _add_call(message, part)
    message.finish_reason = choice["finish_reason"]


def _add_call(message: Message, part: dict[str, Any]) -> None:
    if "id" in part:
        assert part["index"] == len(message.calls) and part["type"] == "function"
        assert part["function"]["arguments"] == ""
        message.calls.append((part["id"], part["function"]["name"], ""))
        return
    assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
    assert part["index"] == len(message.calls) - 1, "arguments of a call that is over"
    identity, name, arguments = message.calls[-1]
    message.calls[-1] = (identity, name, arguments + part["function"]["arguments"])
