"""A parser's deltas as a row of blocks, one open at a time: what the APIs with typed events are made of.

Knows no wire format. Chat completions need none of this; `/v1/responses` calls a block an item, `/v1/messages` a
content block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tokenspeed.text.parsers.interface import ContentDelta, Delta, ReasoningDelta, ToolCallAbandoned, ToolCallStart

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins. `call_id` and `name` are of a call, else ""."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Grown:
    """More text of the open block; of a call: a piece of its arguments' JSON."""

    index: int
    kind: BlockKind
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block has ended.

    Fields:
        text: all of it.
        whole: nothing cut it, and of a call: the parser has not abandoned it.
    """

    index: int
    kind: BlockKind
    text: str
    whole: bool
    call_id: str = ""
    name: str = ""


Step = Opened | Grown | Closed


class Blocks:
    """One answer's blocks. Text or reasoning of nothing but white space (models write some between reasoning and a
    call) is no block: white space at the start of one is held back until more comes."""

    def __init__(self) -> None:
        self._num_opened = 0
        self._open: Opened | None = None
        self._parts: list[str] = []
        self._is_abandoned = False
        self._held = ""
        self._held_kind: BlockKind = "text"

    def feed(self, deltas: Iterable[Delta]) -> list[Step]:
        """What the deltas do to the blocks, in order."""
        steps: list[Step] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    self._grow(steps, "reasoning", text)
                case ContentDelta(text):
                    self._grow(steps, "text", text)
                case ToolCallStart():
                    self._start(steps, "call", delta.id, delta.name)
                case ToolCallAbandoned():
                    self._is_abandoned = True
                case _:
                    self._more(steps, delta.fragment)
        return steps

    def finish(self, cut: bool) -> list[Step]:
        """The answer has ended. `cut`: by the length limit, so the open block is not whole."""
        steps: list[Step] = []
        self._close(steps, whole=not cut)
        return steps

    def _grow(self, steps: list[Step], kind: BlockKind, text: str) -> None:
        if self._open is not None and self._open.kind == kind:
            if text:
                self._held = ""
            self._more(steps, text)
            return
        if self._held_kind != kind:
            self._held_kind, self._held = kind, ""
        self._held += text
        if self._held.strip():
            text = self._held
            self._start(steps, kind)
            self._more(steps, text)

    def _start(self, steps: list[Step], kind: BlockKind, call_id: str = "", name: str = "") -> None:
        self._close(steps, whole=True)
        self._held = ""
        self._open = Opened(self._num_opened, kind, call_id, name)
        self._num_opened += 1
        steps.append(self._open)

    def _more(self, steps: list[Step], text: str) -> None:
        assert self._open is not None, "text of a block that is not open"
        if text:
            self._parts.append(text)
            steps.append(Grown(self._open.index, self._open.kind, text))

    def _close(self, steps: list[Step], whole: bool) -> None:
        if self._open is None:
            return
        block, text = self._open, "".join(self._parts)
        whole = whole and not self._is_abandoned
        steps.append(Closed(block.index, block.kind, text, whole, block.call_id, block.name))
        self._open = None
        self._is_abandoned = False
        self._parts.clear()
