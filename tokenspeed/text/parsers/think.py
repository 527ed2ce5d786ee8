"""Reasoning between an opening and a closing tag: the grammar that most reasoning formats share.

Where the tags count: the reasoning block is the first one that opens; behind it, further blocks count only while
nothing but whitespace lies between. Later tags are the answer's own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenspeed.text.parsers.cursor import Cursor, Markers, Sink, Steps
from tokenspeed.text.parsers.interface import Delta, ParseContext, ReasoningFormat, Starts, WhyNot, call_id
from tokenspeed.text.parsers.output import Output

Place = Literal["inside", "within", "outside", "behind"]
"""Where the generation begins: at a block's beginning, inside one that has text, where a block may come, behind it."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """A family's tags.

    Fields:
        trims: newlines next to the tags are markup, as in templates that write `<think>\\n...\\n</think>\\n\\n`. False:
            the text is given exactly, so that a history with reasoning renders to the tokens that the cache knows.
        implicit_ends: markers that end the reasoning without its closing tag, since the model is known to forget it;
            they are not consumed.
    """

    open: str = "<think>"
    close: str = "</think>"
    trims: bool = True
    implicit_ends: tuple[str, ...] = ()


class ThinkParser:
    """`interface.Parser` for one pair of tags."""

    def __init__(self, tags: ThinkTags, place: Place, context: ParseContext) -> None:
        self.cursor = Cursor()
        self.in_reasoning = place in ("inside", "within")
        self._tags = tags
        self._inline = context.inline_reasoning
        self._open = Markers(tags.open)
        self._ends = Markers(tags.close, *tags.implicit_ends)
        self._output = Output(context, call_id)
        self._run = self._read(place)
        next(self._run)

    @property
    def incomplete(self) -> bool:
        return False

    @property
    def num_whole_calls(self) -> int:
        return 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        if text:
            self.cursor.add(text)
            next(self._run)
        return self._output.taken()

    def flush(self, finish_reason: str) -> list[Delta]:
        self.cursor.end()
        next(self._run, None)
        return self._output.taken()

    def _read(self, place: Place) -> Steps[None]:
        yield  # nothing to read yet
        output = self._output
        if place == "inside":
            # Some models repeat the tag that the prompt already holds.
            space, tag = yield from self._next_tag()
            yield from self._block(space + tag if self._inline or not tag else "")
        elif place == "within":
            yield from self._block("", has_text=True)
        elif place == "outside":
            space, tag = yield from self._next_tag()
            if not tag:
                output.content(space)
                tag = (yield from self.cursor.until(self._open, output.content)) or ""
            if tag:
                yield from self._block(space + tag if self._inline else "")
        yield from self.cursor.rest(output.content)

    def _next_tag(self) -> Steps[tuple[str, str]]:
        """(whitespace, opening tag or ""), both consumed."""
        self.cursor.record("")
        yield from self.cursor.space()
        space = self.cursor.recorded()
        return space, self._tags.open if (yield from self.cursor.literal(self._tags.open)) else ""

    def _block(self, before: str, has_text: bool = False) -> Steps[None]:
        """From behind an opening tag to the answer, which may be behind further blocks. `before`: consumed text of the
        block. `has_text`: the prompt holds its beginning."""
        output, trims = self._output, self._tags.trims and not self._inline
        while True:
            self.in_reasoning = True
            body = _Body(output.reasoning, trims, has_text)
            body.add(before)
            end = yield from self.cursor.until(self._ends, body.add)
            self.in_reasoning = False
            if end != self._tags.close:
                output.content(end or "")
                return
            if self._inline:
                output.reasoning(end)
            space, tag = yield from self._next_tag()
            if not tag:
                output.content(space.lstrip("\n") if trims else space)
                return
            before, has_text = space + tag if self._inline else "", False


class _Body:
    """Gives text on without the newlines at its beginning (unless it has `begun`) and end, if it `trims`."""

    def __init__(self, sink: Sink, trims: bool, begun: bool) -> None:
        self._sink = sink
        self._trims = trims
        self._begun = begun
        self._newlines = 0

    def add(self, text: str) -> None:
        if not self._trims:
            self._sink(text)
            return
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        kept = text.rstrip("\n")
        if kept:
            self._sink("\n" * self._newlines + kept)
            self._newlines = 0
        self._newlines += len(text) - len(kept)


def place_of(tags: ThinkTags, starts: Starts, context: ParseContext) -> Place:
    """Where the generation begins: the text of a continued message decides if there is any, then the prompt's end if it
    is a tag, then the request, then the family."""
    end = context.prompt or ""
    shown = _shared_end(end, context.continued or "")
    if shown.strip():
        return _place_behind(tags, starts, end.removesuffix(shown), shown)
    end = end.rstrip()
    if end.endswith(tags.open):
        return "inside"
    if end.endswith(tags.close):
        return "behind"
    return "inside" if starts == "yes" and context.thinking is not False else "outside"


def _place_behind(tags: ThinkTags, starts: Starts, head: str, shown: str) -> Place:
    """Where a message that already says `shown`, behind `head`, goes on: the same rules as if it had been generated."""
    head = head.rstrip()
    opened, closed = shown.find(tags.open), shown.find(tags.close)
    if head.endswith(tags.open) or (starts == "yes" and closed >= 0 and (opened < 0 or closed < opened)):
        at = 0
    elif head.endswith(tags.close) and not shown.lstrip().startswith(tags.open):
        return "behind"
    elif opened >= 0:
        at = opened + len(tags.open)
    else:
        return "behind" if starts == "yes" else "outside"  # a message without tags is an answer
    while (end := shown.find(tags.close, at)) >= 0:
        rest = shown[end + len(tags.close) :].lstrip()
        if not rest.startswith(tags.open):
            return "behind"
        at = len(shown) - len(rest) + len(tags.open)
    return "within" if shown[at:].strip() else "inside"


def _shared_end(prompt: str, text: str) -> str:
    """What both end with. White space at the end of `text` may be missing in the prompt: templates trim."""
    text = text if prompt.endswith(text[-1:]) else text.rstrip()
    length = next(
        (count for count in range(min(len(prompt), len(text))) if prompt[-1 - count] != text[-1 - count]),
        min(len(prompt), len(text)),
    )
    return text[len(text) - length :]


def think_format(
    names: tuple[str, ...],
    tags: ThinkTags,
    starts: Starts,
    why_not: WhyNot,
    rank: int,
    needs_special_tokens: bool = False,
) -> ReasoningFormat:
    """A format of tags; the arguments are fields of `ReasoningFormat`."""
    return ReasoningFormat(
        names=names,
        make=lambda context: ThinkParser(tags, place_of(tags, starts, context), context),
        why_not=why_not,
        rank=rank,
        starts=starts,
        start_marker=tags.open,
        end_marker=tags.close,
        needs_special_tokens=needs_special_tokens,
    )
