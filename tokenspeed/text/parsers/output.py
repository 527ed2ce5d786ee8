"""Where a grammar puts what it finds: content, reasoning and calls become deltas.

Whitespace rule: where a format's templates put whitespace between text and call, `trims` holds back whitespace at the
end of content and drops it when a call follows. What follows a call's markup, the grammar skips itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from tokenspeed.text.parsers.interface import (
    CallId,
    ContentDelta,
    Delta,
    ParseContext,
    ReasoningDelta,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallStart,
    ToolSpec,
)
from tokenspeed.text.parsers.model_json import json_object

_PLAUSIBLE_NAME = re.compile(r"[^\s\"'<>{}\[\]()]{1,256}")
_LOOSE = re.compile(r"\s+|(?<=:)\d+")  # white space around tags, and running numbers

Spellings = Callable[[str], Iterable[str]]
"""Function name -> how the text of its calls may begin, up to the arguments, without running numbers."""


class Output:
    """One sequence's deltas.

    Args:
        trims: whitespace between content and a call is markup.
        call_id: the family's form of ids.
        keeps_ids: an id that the model wrote is the call's id.
        is_forced: a grammar holds the whole output to calls, so text that ends before it is one is a cut call.
    """

    def __init__(
        self,
        context: ParseContext,
        call_id: CallId,
        trims: bool = False,
        keeps_ids: bool = False,
        is_forced: bool = False,
    ) -> None:
        self.context = context
        self.keeps_ids = keeps_ids
        self.is_forced = is_forced
        self.incomplete = False
        self.num_calls = 0
        self.num_whole_calls = 0
        self._call_id = call_id
        self._trims = trims
        self._tools = None if context.tools is None else {tool.name: tool for tool in context.tools}
        self._deltas: list[Delta] = []
        self._space: list[str] = []
        self._call_open = False
        self._written: list[str] = []  # arguments of the open call

    def taken(self) -> list[Delta]:
        """The deltas since the last time, neighbours of one kind joined."""
        deltas, self._deltas = self._deltas, []
        return join_neighbours(deltas)

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if text:
            self._deltas.append(ReasoningDelta(text))

    def content(self, text: str) -> None:
        """More content."""
        if self._trims:
            kept = text.rstrip()
            if not kept:
                self._space.append(text)
                return
            space, self._space = self._space, [text[len(kept) :]]
            text = "".join(space) + kept
        if text:
            self._deltas.append(ContentDelta(text))

    def accepts(self, name: str) -> bool:
        """Whether `name` may be called."""
        if self._tools is None:
            return _PLAUSIBLE_NAME.fullmatch(name) is not None
        return name in self._tools

    def may_call(self, begun: str) -> bool:
        """Whether a name that may be called begins so; of "": whether any may be."""
        if self._tools is None:
            return not begun or self.accepts(begun)
        return any(name.startswith(begun) for name in self._tools)

    def may_begin(self, begun: str, spellings: Spellings) -> bool:
        """Whether a call that may be made begins so. Where every name may be called, all that is begun may."""
        text = _LOOSE.sub("", begun)
        names = () if self._tools is None else self._tools
        return self._tools is None or any(
            _LOOSE.sub("", spelling).startswith(text) for name in names for spelling in spellings(name)
        )

    def parameters(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a function's parameters; None when no tools are known."""
        tool: ToolSpec | None = None if self._tools is None else self._tools.get(name)
        return None if tool is None else tool.parameters

    def start(self, name: str, own_id: str | None = None) -> None:
        """A call begins. `own_id`: the id that the model wrote."""
        assert not self._call_open, "a call inside a call"
        self._space.clear()
        self._call_open = True
        self._written.clear()
        index = self.num_calls
        self.num_calls += 1
        identity = self._call_id(self.context, name, index) if own_id is None else own_id
        self._deltas.append(ToolCallStart(index, identity, name))

    def arguments(self, fragment: str) -> None:
        """More of the open call's arguments."""
        if fragment:
            self._written.append(fragment)
            self._deltas.append(ToolCallArguments(self.num_calls - 1, fragment))

    @property
    def has_arguments(self) -> bool:
        """The open call's arguments are a whole JSON object. Looks at all of them."""
        return json_object("".join(self._written)) is not None

    def end(self) -> None:
        """The open call has its end. Arguments that are no JSON object leave it incomplete all the same."""
        if not self.has_arguments:
            self.abandon()
            return
        self._call_open = False
        self.num_whole_calls += 1

    def abandon(self) -> None:
        """The open call cannot be continued: what was given of it stays, incomplete."""
        if self._call_open:
            self._call_open = False
            self.incomplete = True
            self._deltas.append(ToolCallAbandoned(self.num_calls - 1))

    def cut(self) -> None:
        """A call was cut before it could begin; its text is markup."""
        self._space.clear()
        self.incomplete = True

    def finish(self, finish_reason: str) -> None:
        """The text has ended. A call whose arguments are whole only lacks markup (the stop token took its
        place), unless the length limit cut it."""
        if self._call_open and (finish_reason == "length" or not self.has_arguments):
            self.abandon()
        self._call_open = False
        space = "".join(self._space)
        self._space.clear()
        if space:
            self._deltas.append(ContentDelta(space))


def join_neighbours(deltas: Iterable[Delta]) -> list[Delta]:
    """The same, neighbours of one kind joined."""
    return [_joined(list(group)) for _, group in groupby(deltas, key=_kind)]


def _kind(delta: Delta) -> tuple[str, int]:
    # Starts never join: each has its own index, and its arguments come between.
    return type(delta).__name__, -1 if isinstance(delta, ContentDelta | ReasoningDelta) else delta.index


def _joined(group: list[Delta]) -> Delta:
    first = group[0]
    match first:
        case ToolCallArguments(index, _):
            return ToolCallArguments(index, "".join(part.fragment for part in group if isinstance(part, type(first))))
        case ReasoningDelta() | ContentDelta():
            return type(first)("".join(part.text for part in group if isinstance(part, type(first))))
        case _:
            return first
