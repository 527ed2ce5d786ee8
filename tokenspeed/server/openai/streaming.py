"""Events to SSE chunks, for both endpoints: what may be sent when, and the bytes around it.

An endpoint gives a `ChunkShape` that writes its own choices; order, stream_interval, usage and the single finish chunk
per choice live here. The common chunk (text only) is built by joining bytes, about a microsecond.
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


async def chunks(
    events: AsyncGenerator[tuple[int, GenerationEvent], None],
    shape: ChunkShape,
    rules: StreamRules,
    on_close: Callable[[], None],
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one or more whole SSE events each. Closes `events`, then calls `on_close`, however it ends."""
    meter = UsageMeter()
    writer = _Writer(shape, rules)
    try:
        async with aclosing(events):
            async for prompt, event in events:
                meter.note(prompt, event)
                if rules.continuous_usage:
                    writer.tail = b',"usage":' + encode_json(meter.usage()) + b"}\n\n"
                if out := writer.write(prompt, event):
                    yield out
        if rules.include_usage:
            yield shape.usage() + b',"usage":' + encode_json(meter.usage()) + b"}\n\n"
    finally:
        on_close()


class _Writer:
    """Turns one event after the other into bytes; holds text back until a chunk has `interval` tokens."""

    def __init__(self, shape: ChunkShape, rules: StreamRules) -> None:
        self._shape = shape
        self._rules = rules
        self._opened: set[int] = set()
        self._pending: dict[int, Delta] = {}
        self._is_fast = rules.is_plain and rules.interval <= 1
        self.tail = b',"usage":null}\n\n' if rules.include_usage else b"}\n\n"

    def write(self, prompt: int, event: GenerationEvent) -> bytes:
        """The event's chunks, often none or one."""
        choice = prompt * self._rules.n + event.index
        out = b""
        if choice not in self._opened:
            self._opened.add(choice)
            first = self._shape.open(choice, prompt, event)
            out = first + self.tail if first is not None else out
        if self._is_fast:
            if event.text:
                out += self._shape.text(choice, event.text) + self.tail
        else:
            out += self._gather(choice, event)
        if event.finish_reason is not None:
            out += self._shape.finish(choice, event) + self.tail
        return out

    def _gather(self, choice: int, event: GenerationEvent) -> bytes:
        delta = self._pending.setdefault(choice, Delta())
        delta.add(event)
        is_full = delta.num_tokens >= self._rules.interval or event.finish_reason is not None
        has_news = any(delta.text) or (not self._rules.is_plain and delta.num_tokens > 0)
        if not (is_full and has_news):
            return b""
        del self._pending[choice]
        return self._shape.delta(choice, delta) + self.tail
