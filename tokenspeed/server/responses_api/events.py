"""The typed events of a streamed response, and the item they make of a parser's deltas.

`ResponseWriter` is used for whole answers, too: then its events are not written, only its items are taken.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenspeed.server.blocks import Blocks, Closed, Grown, Opened, Step
from tokenspeed.server.carried import pack
from tokenspeed.server.responses_api.items import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from tokenspeed.server.responses_api.namespaces import split
from tokenspeed.server.responses_api.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from tokenspeed.text.parsers.interface import Delta


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """Any event. `sequence_number` counts from 0 without a gap."""

    sequence_number: int


class Created(Event, tag="response.created", kw_only=True):
    """The first event."""

    response: ResponseObject


class InProgress(Event, tag="response.in_progress", kw_only=True):
    """The second event."""

    response: ResponseObject


class Completed(Event, tag="response.completed", kw_only=True):
    """The last event of a response that ended by itself."""

    response: ResponseObject


class Incomplete(Event, tag="response.incomplete", kw_only=True):
    """The last event of a response that reached max_output_tokens or the context's end."""

    response: ResponseObject


class Failed(Event, tag="response.failed", kw_only=True):
    """The last event of a response that failed under way; `response.error` says why."""

    response: ResponseObject


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    """An item begins; it is empty and in progress."""

    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    """An item has ended; it is whole here."""

    output_index: int
    item: OutputItem


class PartAdded(Event, tag="response.content_part.added", kw_only=True):
    """The content of a message or of reasoning begins."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(Event, tag="response.content_part.done", kw_only=True):
    """The content has ended."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(Event, tag="response.output_text.delta", kw_only=True):
    """More text of a message."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[Any] = []


class TextDone(Event, tag="response.output_text.done", kw_only=True):
    """All text of a message."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[Any] = []


class ReasoningDelta(Event, tag="response.reasoning_text.delta", kw_only=True):
    """More reasoning."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(Event, tag="response.reasoning_text.done", kw_only=True):
    """All text of a reasoning item."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done", kw_only=True):
    """All of a call's arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


def sse(events: Sequence[Event]) -> bytes:
    """Events as server-sent events."""
    encode = msgspec.json.encode
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), encode(event)) for event in events
    )


_ID_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseWriter:
    """One response while it grows: deltas in, events out.

    Args:
        shell: the response before anything was generated, in progress.
        carries_reasoning: reasoning items get `encrypted_content`.
        namespaced: namespace and name of the functions that a model knows by one name for both.
    Attributes:
        response: the response as it is now.
    """

    def __init__(
        self, shell: ResponseObject, carries_reasoning: bool, namespaced: Mapping[str, tuple[str, str]]
    ) -> None:
        self.response = shell
        self._namespaced = namespaced
        self._carries_reasoning = carries_reasoning
        self._blocks = Blocks()
        self._items: list[OutputItem] = []
        self._item_id = ""
        self._num_events = 0

    def start(self) -> list[Event]:
        """The events before any output."""
        return [
            Created(sequence_number=self._next(), response=self.response),
            InProgress(sequence_number=self._next(), response=self.response),
        ]

    def feed(self, deltas: Sequence[Delta]) -> list[Event]:
        """The deltas' events."""
        return [event for step in self._blocks.feed(deltas) for event in self._events(step)]

    def finish(self, is_cut: bool, usage: ResponseUsage) -> list[Event]:
        """The last events. `is_cut`: by the length limit."""
        events = [event for step in self._blocks.finish(is_cut) for event in self._events(step)]
        self.response = msgspec.structs.replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=tuple(self._items),
            usage=usage,
        )
        last = Incomplete if is_cut else Completed
        return [*events, last(sequence_number=self._next(), response=self.response)]

    def fail(self, code: str, message: str) -> list[Event]:
        """The one event that ends a response which cannot go on. The open item never gets its end."""
        self.response = msgspec.structs.replace(
            self.response,
            status="failed",
            error=ResponseError(code=code, message=message),
            output=tuple(self._items),
        )
        return [Failed(sequence_number=self._next(), response=self.response)]

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _events(self, step: Step) -> list[Event]:
        match step:
            case Opened():
                return self._opened(step)
            case Grown():
                return [self._grown(step)]
            case Closed():
                return self._closed(step)

    def _opened(self, step: Opened) -> list[Event]:
        self._item_id = f"{_ID_PREFIX[step.kind]}_{uuid.uuid4().hex}"
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": step.index}
        item: OutputItem
        if step.kind == "call":
            item = self._call(step, "in_progress", "")
            return [ItemAdded(sequence_number=self._next(), output_index=step.index, item=item)]
        part: OutputText | ReasoningText
        if step.kind == "text":
            item = MessageItem(id=self._item_id, status="in_progress", role="assistant", content=[])
            part = OutputText(text="")
        else:
            item = ReasoningItem(id=self._item_id, status="in_progress", content=[])
            part = ReasoningText(text="")
        return [
            ItemAdded(sequence_number=self._next(), output_index=step.index, item=item),
            PartAdded(sequence_number=self._next(), part=part, **place),
        ]

    def _grown(self, step: Grown) -> Event:
        number, item_id, index, text = self._next(), self._item_id, step.index, step.text
        match step.kind:
            case "text":
                return TextDelta(sequence_number=number, item_id=item_id, output_index=index, delta=text)
            case "reasoning":
                return ReasoningDelta(sequence_number=number, item_id=item_id, output_index=index, delta=text)
            case "call":
                return ArgumentsDelta(sequence_number=number, item_id=item_id, output_index=index, delta=text)

    def _closed(self, step: Closed) -> list[Event]:
        item = self._whole_item(step)
        self._items.append(item)
        place: dict[str, Any] = {"item_id": self._item_id, "output_index": step.index}
        events: list[Event] = []
        if step.kind == "call":
            name = split(step.name, self._namespaced)[1]
            events.append(ArgumentsDone(sequence_number=self._next(), name=name, arguments=step.text, **place))
        elif step.kind == "text":
            events.append(TextDone(sequence_number=self._next(), text=step.text, **place))
            events.append(PartDone(sequence_number=self._next(), part=OutputText(text=step.text), **place))
        else:
            events.append(ReasoningDone(sequence_number=self._next(), text=step.text, **place))
            events.append(PartDone(sequence_number=self._next(), part=ReasoningText(text=step.text), **place))
        events.append(ItemDone(sequence_number=self._next(), output_index=step.index, item=item))
        return events

    def _call(self, step: Opened | Closed, status: Status, arguments: str) -> FunctionCallItem:
        namespace, name = split(step.name, self._namespaced)
        return FunctionCallItem(
            id=self._item_id,
            status=status,
            call_id=step.call_id,
            name=name,
            namespace=msgspec.UNSET if namespace is None else namespace,
            arguments=arguments,
        )

    def _whole_item(self, step: Closed) -> OutputItem:
        status: Status = "completed" if step.whole else "incomplete"
        if step.kind == "call":
            return self._call(step, status, step.text)
        if step.kind == "text":
            content: list[Any] = [OutputText(text=step.text)]
            return MessageItem(id=self._item_id, status=status, role="assistant", content=content)
        return ReasoningItem(
            id=self._item_id,
            status=status,
            content=[ReasoningText(text=step.text)],
            encrypted_content=pack(step.text) if self._carries_reasoning else None,
        )


def to_usage(num_prompt: int, num_cached: int, num_output: int, num_reasoning: int) -> ResponseUsage:
    """`usage` from token counts."""
    return ResponseUsage(
        input_tokens=num_prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=num_cached),
        output_tokens=num_output,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
        total_tokens=num_prompt + num_output,
    )
