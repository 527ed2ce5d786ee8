"""The message of `/v1/messages`, whole and as the typed events of a stream.

`MessageWriter` is used for whole answers, too: then its events are not written, only its blocks are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenspeed.server.anthropic.blocks import AnsweredToolUse, OutputBlock, TextBlock, ThinkingBlock
from tokenspeed.server.blocks import Blocks, Closed, Grown, Opened, Step
from tokenspeed.server.carried import pack
from tokenspeed.text.parsers.interface import Delta

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]

# Nothing here is signed. Some clients leave thinking blocks without any signature out of what they send back.
UNSIGNED = "unsigned"


class ThinkingTokens(msgspec.Struct, kw_only=True):
    """How much of the output was thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. A prompt has input_tokens + cache_read_input_tokens; writing the cache is not counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | msgspec.UnsetType = msgspec.UNSET


class MessageObject(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The end of a thinking block."""

    signature: str


class InputJsonDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a tool's input, as a piece of JSON."""

    partial_json: str


class StopDelta(msgspec.Struct, kw_only=True):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    """The first event; the message is empty."""

    message: MessageObject


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: OutputBlock


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block has ended."""

    index: int


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    """The end's reason and the final counts."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def sse(events: Sequence[Event]) -> bytes:
    """Events as server-sent events."""
    encode = msgspec.json.encode
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), encode(event)) for event in events
    )


class MessageWriter:
    """One message while it grows: deltas in, events out.

    Args:
        omits_thinking: thinking blocks come without text; the signature carries it.
    Attributes:
        message: all of it, after `finish`. A call that was cut off or is malformed is not in it.
    """

    def __init__(self, message_id: str, model: str, omits_thinking: bool) -> None:
        self.message: MessageObject | None = None
        self._content: list[OutputBlock] = []
        self._id = message_id
        self._model = model
        self._omits_thinking = omits_thinking
        self._blocks = Blocks()

    def start(self, usage: MessageUsage) -> list[Event]:
        """The event before any output."""
        return [MessageStart(message=MessageObject(id=self._id, model=self._model, content=[], usage=usage))]

    def feed(self, deltas: Sequence[Delta]) -> list[Event]:
        """The deltas' events."""
        return [event for step in self._blocks.feed(deltas) for event in self._events(step)]

    def finish(self, stop: StopDelta, usage: MessageUsage) -> list[Event]:
        """The last events."""
        steps = self._blocks.finish(cut=stop.stop_reason == "max_tokens")
        events = [event for step in steps for event in self._events(step)]
        self.message = MessageObject(
            id=self._id,
            model=self._model,
            content=self._content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=usage,
        )
        return [*events, MessageDelta(delta=stop, usage=usage), MessageStop()]

    def _events(self, step: Step) -> list[Event]:
        match step:
            case Opened():
                return [BlockStart(index=step.index, content_block=_empty(step))]
            case Grown():
                if step.kind == "reasoning" and self._omits_thinking:
                    return []
                return [BlockDelta(index=step.index, delta=_delta(step))]
            case Closed():
                return self._closed(step)

    def _closed(self, step: Closed) -> list[Event]:
        stop = BlockStop(index=step.index)
        if step.kind == "text":
            self._content.append(TextBlock(text=step.text))
            return [stop]
        if step.kind == "call":
            if step.whole:
                written = msgspec.Raw(step.text.encode())
                self._content.append(AnsweredToolUse(id=step.call_id, name=step.name, input=written))
            return [stop]
        signature = pack(step.text) if self._omits_thinking else UNSIGNED
        self._content.append(ThinkingBlock(thinking="" if self._omits_thinking else step.text, signature=signature))
        return [BlockDelta(index=step.index, delta=SignatureDelta(signature=signature)), stop]


def to_usage(num_prompt: int, num_cached: int, num_output: int, num_reasoning: int | None) -> MessageUsage:
    """`usage` from token counts."""
    details: Any = msgspec.UNSET if num_reasoning is None else ThinkingTokens(thinking_tokens=num_reasoning)
    return MessageUsage(
        input_tokens=num_prompt - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
        output_tokens_details=details,
    )


def _empty(step: Opened) -> OutputBlock:
    match step.kind:
        case "text":
            return TextBlock(text="")
        case "reasoning":
            return ThinkingBlock(thinking="")
        case "call":
            return AnsweredToolUse(id=step.call_id, name=step.name, input=msgspec.Raw(b"{}"))


def _delta(step: Grown) -> TextDelta | ThinkingDelta | InputJsonDelta:
    match step.kind:
        case "text":
            return TextDelta(text=step.text)
        case "reasoning":
            return ThinkingDelta(thinking=step.text)
        case "call":
            return InputJsonDelta(partial_json=step.text)
