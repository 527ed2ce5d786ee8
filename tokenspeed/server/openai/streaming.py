"""Events to SSE chunks: what may be sent when, and the bytes around it.

An endpoint gives a `Writer`: its own, or `ChoiceWriter` over a `ChunkShape` that writes its choices; there order,
stream_interval and the single finish chunk per choice live here. The common chunk (text only) is built by joining
bytes, about a microsecond.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tokenspeed.engine.interface import GenerationEvent, LogprobEntry
from tokenspeed.server.openai.usage import UsageMeter

encode_json = msgspec.json.encode


@dataclass(slots=True)
class Delta:
    """What a choice has new to say."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, event: GenerationEvent) -> None:
        """Take an event's news."""
        self.text.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.num_tokens += len(event.token_ids)


class ChunkShape(Protocol):
    """An endpoint's way to write the JSON of one choice (without the closing brace of the chunk)."""

    def open(self, choice: int, prompt: int, event: GenerationEvent) -> bytes | None:
        """The choice's first chunk (role, echo), or None when there is none."""
        ...

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of only text."""
        ...

    def delta(self, choice: int, delta: Delta) -> bytes:
        """A chunk with text and whatever else was asked."""
        ...

    def finish(self, choice: int, event: GenerationEvent) -> bytes:
        """The choice's last chunk, with its finish_reason."""
        ...

    def usage(self) -> bytes:
        """The start of the chunk with no choices."""
        ...


@dataclass(frozen=True, slots=True)
class StreamRules:
    """What the request and the server's flags say about chunks.

    Fields:
        n: sequences a prompt.
        interval: tokens a chunk carries at least, except the last.
        is_plain: nothing but text was asked (no logprobs, no token ids).
        include_usage, continuous_usage: see `StreamOptions`.
    """

    n: int
    interval: int
    is_plain: bool
    include_usage: bool
    continuous_usage: bool


class Writer(Protocol):
    """Turns one event after the other into bytes, whole SSE events each."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that were reasoning, so far."""
        ...

    def write(self, prompt: int, event: GenerationEvent, tail: Callable[[], bytes]) -> bytes:
        """The event's chunks, often none or one; each ends with `tail()`, asked for once the event has been read."""
        ...

    def usage(self) -> bytes:
        """The start of the chunk with no choices."""
        ...


async def chunks(
    events: AsyncGenerator[tuple[int, GenerationEvent], None],
    writer: Writer,
    rules: StreamRules,
    on_close: Callable[[], None],
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one or more whole SSE events each. Closes `events`, then calls `on_close`, however it ends."""
    meter = UsageMeter()
    plain_tail = b',"usage":null}\n\n' if rules.include_usage else b"}\n\n"

    def usage_tail() -> bytes:
        return b',"usage":' + encode_json(meter.usage(writer.num_reasoning_tokens)) + b"}\n\n"

    tail = usage_tail if rules.continuous_usage else lambda: plain_tail
    try:
        async with aclosing(events):
            async for prompt, event in events:
                meter.note(prompt, event)
                if out := writer.write(prompt, event, tail):
                    yield out
        if rules.include_usage:
            yield writer.usage() + usage_tail()
    finally:
        on_close()


class ChoiceWriter:
    """`Writer` of plain text; holds text back until a chunk has `interval` tokens."""

    num_reasoning_tokens = 0

    def __init__(self, shape: ChunkShape, rules: StreamRules) -> None:
        self._shape = shape
        self._rules = rules
        self._opened: set[int] = set()
        self._pending: dict[int, Delta] = {}
        self._is_fast = rules.is_plain and rules.interval <= 1

    def write(self, prompt: int, event: GenerationEvent, tail: Callable[[], bytes]) -> bytes:
        """See `Writer`."""
        choice, end = prompt * self._rules.n + event.index, tail()
        out = b""
        if choice not in self._opened:
            self._opened.add(choice)
            first = self._shape.open(choice, prompt, event)
            out = first + end if first is not None else out
        if self._is_fast:
            if event.text:
                out += self._shape.text(choice, event.text) + end
        else:
            out += self._gather(choice, event, end)
        if event.finish_reason is not None:
            out += self._shape.finish(choice, event) + end
        return out

    def usage(self) -> bytes:
        """See `Writer`."""
        return self._shape.usage()

    def _gather(self, choice: int, event: GenerationEvent, end: bytes) -> bytes:
        delta = self._pending.setdefault(choice, Delta())
        delta.add(event)
        is_full = delta.num_tokens >= self._rules.interval or event.finish_reason is not None
        has_news = any(delta.text) or (not self._rules.is_plain and delta.num_tokens > 0)
        if not (is_full and has_news):
            return b""
        del self._pending[choice]
        return self._shape.delta(choice, delta) + end
