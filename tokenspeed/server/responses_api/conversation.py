"""Items to what a chat template sees, and an input's raw JSON to items."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.carried import unpack
from tokenspeed.server.openai.fields import drop_refused
from tokenspeed.server.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
)
from tokenspeed.server.responses_api.namespaces import flat_name
from tokenspeed.text.messages import Content, joined, text_or_parts
from tokenspeed.text.parsers.model_json import json_object

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_CALL_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "async": ((None, False), "an output is the next request's"),
    "caller": ((None, {"type": "direct"}), "functions are called by the model alone"),
}
_PARTS = ("input_text", "output_text", "refusal")

ChatMessage = dict[str, Any]


def plain_input(value: Any) -> Any:
    """An input's JSON as `to_struct` takes it: text as one user message, `type` where a message left it out, and no
    null fields (an SDK writes null for what it knows and has not).

    Raises:
        InvalidRequest: an item or a content part of a kind that is not served; names it.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [_plain_item(item, f"input[{number}]") for number, item in enumerate(value)]


def to_keep(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items as they are kept and listed: each with an id and a status, contents as parts."""
    kept: list[Item] = []
    for item in items:
        new_id = item.id or f"{_ID_PREFIXES[str(item.__struct_config__.tag)]}_{secrets.token_hex(16)}"
        changes: dict[str, Any] = {"id": new_id, "status": item.status or "completed"}
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            part = OutputText if item.role == "assistant" else InputText
            changes["content"] = [part(text=item.content)]
        kept.append(msgspec.structs.replace(item, **changes))
    return tuple(kept)


def to_messages(items: Sequence[Item], instructions: str | None, num_earlier: int = 0) -> list[ChatMessage]:
    """A conversation as a chat template sees it.

    What an assistant did in a row (reasoning, then text, then calls) is one message, and so are instructions and system
    and developer messages at the start: templates know it that way. A call whose status is incomplete is left out.

    Args:
        num_earlier: how many items are from stored responses; only for the names in errors.
    Raises:
        InvalidRequest: no items, an output of a call that is not in the conversation, a second call or output of one
            call_id, arguments that are no JSON object, or reasoning that cannot be read.
    """
    if not items:
        raise InvalidRequest("input is empty, it must hold at least one item", param="input")
    talk = _Talk()
    if instructions is not None:
        talk.add_message("system", instructions)
    for number, item in enumerate(items):
        talk.add(item, f"input[{number - num_earlier}]" if number >= num_earlier else "previous_response_id")
    return _with_joined_start(talk.messages)


class _Talk:
    """Messages while items come."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._assistant: ChatMessage | None = None  # the last message, when it can still take more
        self._call_ids: set[str] = set()
        self._answered_ids: set[str] = set()

    def add(self, item: Item, where: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._before_output()["content"] = _content(item.content)
            case MessageItem():
                # Families served here have no developer role of their own; OpenAI defines it as the newer system role.
                role = "system" if item.role == "developer" else item.role
                content = _content(item.content)
                self.add_message(role, joined(content) if role == "system" else content)
            case ReasoningItem():
                message = self._before_output()
                message["reasoning_content"] = message.get("reasoning_content", "") + _reasoning(item)
            case FunctionCallItem():
                self._add_call(item, where)
            case FunctionCallOutputItem():
                if item.call_id not in self._call_ids:
                    raise InvalidRequest(
                        f"{where}: there is no function_call with call_id {item.call_id[:100]!r} before its output",
                        param=f"{where}.call_id",
                    )
                _check_new(item.call_id, self._answered_ids, where, "function_call_output")
                self.add_message("tool", _content(item.output), tool_call_id=item.call_id)

    def add_message(self, role: str, content: Content, tool_call_id: str | None = None) -> None:
        self._assistant = None
        answers = {} if tool_call_id is None else {"tool_call_id": tool_call_id}
        self.messages.append({"role": role, "content": content, **answers})

    def _add_call(self, item: FunctionCallItem, where: str) -> None:
        # A call that was cut may spell an object all the same (`{}` of nothing, or all but the end): it was not made.
        if item.status == "incomplete":
            return
        arguments = json_object(item.arguments or "{}")
        if arguments is None:
            raise InvalidRequest(
                f"{where}.arguments must be a JSON object written as a string", param=f"{where}.arguments"
            )
        _check_new(item.call_id, self._call_ids, where, "function_call")
        message = self._assistant if self._assistant is not None else self._new_assistant()
        name = flat_name(item.namespace or None, item.name)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _before_output(self) -> ChatMessage:
        """The assistant's message that has neither text nor calls yet, or a new one."""
        message = self._assistant
        if message is None or message["content"] or "tool_calls" in message:
            message = self._new_assistant()
        return message

    def _new_assistant(self) -> ChatMessage:
        self._assistant = {"role": "assistant", "content": ""}
        self.messages.append(self._assistant)
        return self._assistant


def _check_new(call_id: str, known: set[str], where: str, kind: str) -> None:
    """Add to `known` what must be new to it: two calls, or two outputs, of one id could not be told apart."""
    if call_id in known:
        raise InvalidRequest(
            f"{where}: there is already a {kind} with call_id {call_id[:100]!r} before it; ids must be unique",
            param=f"{where}.call_id",
        )
    known.add(call_id)


def _with_joined_start(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Most templates know a system message only at the very start, and only one."""
    num = 0
    while num < len(messages) and messages[num]["role"] == "system":
        num += 1
    if num < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(each["content"] for each in messages[:num])}, *messages[num:]]


def _reasoning(item: ReasoningItem) -> str:
    """What another server has encrypted is left out: its summary stands for it, if it has one."""
    if item.content:
        return "".join(part.text for part in item.content)
    text = None if item.encrypted_content is None else unpack(item.encrypted_content)
    return "\n".join(part.text for part in item.summary) if text is None else text


def _content(content: str | Sequence[InputText | OutputText | Refusal]) -> Content:
    if isinstance(content, str):
        return content
    return text_or_parts([part.refusal if isinstance(part, Refusal) else part.text for part in content])


def _plain_item(item: Any, where: str) -> Any:
    if not isinstance(item, dict):
        return item
    plain = {key: value for key, value in item.items() if value is not None}
    if "type" not in plain and "role" in plain:
        plain = {"type": "message", **plain}
    kind = plain.get("type")
    if isinstance(kind, str) and kind not in _ID_PREFIXES:
        hint = "send the item itself, or previous_response_id" if kind == "item_reference" else "leave it out"
        raise InvalidRequest(
            f"{where} is of type {kind[:80]!r}; there are only {', '.join(_ID_PREFIXES)}; {hint}",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if kind in ("function_call", "function_call_output"):
        plain = drop_refused(plain, _CALL_REFUSED, where=where)
    for name in ("content", "output"):
        if kind != "reasoning" and isinstance(plain.get(name), list):
            plain[name] = [_plain_part(part, f"{where}.{name}[{place}]") for place, part in enumerate(plain[name])]
    return plain


def _plain_part(part: Any, where: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind not in _PARTS:
        raise InvalidRequest(
            f"{where} is of type {kind[:80]!r}; this model takes text only ({', '.join(_PARTS)})",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if part.get("annotations"):
        raise InvalidRequest(f"{where}.annotations cannot be used: it must be empty", param=f"{where}.annotations")
    return {key: value for key, value in part.items() if value is not None and key != "prompt_cache_breakpoint"}
