"""A call as a JSON object with a name and arguments, in any order: the core of json, qwen, llama and mistral.

Arguments go out as they come once the name is known. They are the model's own text, not re-encoded: a key that they
repeat or escape is the reader's, whose JSON parser takes the last. A second name or second arguments of one call are
refused, as the first are on their way by then: the call is malformed. Arguments that are no object make no call.
"""

from __future__ import annotations

from typing import Literal

from tokenspeed.text.parsers.cursor import Cursor, Steps, decode_string, drop
from tokenspeed.text.parsers.model_json import json_object
from tokenspeed.text.parsers.output import Output, Spellings

MAX_NAME_CHARS = 512
"""Longest JSON text of a key or a name, and longest header of the marked formats: what is longer is no call."""

_ARGUMENTS = ("arguments", "parameters")

Found = Literal["call", "broken", "text", "cut"]


def call_object(cursor: Cursor, output: Output, needs_arguments: bool) -> Steps[Found]:
    """Read the object that begins at the cursor's `{`. The caller has begun a recording.

    Args:
        needs_arguments: an object without arguments is no call (where no markup says that it is one).
    Returns:
        "call": it was one, its end is marked. "broken": it was one and has no proper end; the text goes on behind what
        could be read. "text": it is none; the recording goes on and holds all that was consumed. "cut": as "text", but
        the length limit cut it where a call could still have come of it.
    """
    return (yield from _CallObject(cursor, output, needs_arguments).read())


def call_or_text(cursor: Cursor, output: Output, needs_arguments: bool) -> Steps[bool]:
    """`call_object`, with the recording sent to content when it is no call; True for a whole call."""
    found = yield from call_object(cursor, output, needs_arguments)
    if found == "text":
        text_or_cut(cursor, output)
    elif found == "cut":
        drop_begun(cursor, output)
    return found == "call"


def text_or_cut(cursor: Cursor, output: Output) -> None:
    """What is recorded is no call: content, unless the call was forced and only lacks its rest."""
    raw = cursor.recorded()
    if output.is_forced and cursor.ended:  # as in `give_up`
        cursor.discard()
        output.cut()
    else:
        output.content(raw)


def cut_call(cursor: Cursor, output: Output, spellings: Spellings) -> bool:
    """Whether what is recorded, with what is held, is the beginning of a call that the length limit cut before its
    arguments. Then it is markup, which nobody wants as content, and dropped."""
    begun = cursor.begun().strip() if cursor.cut else ""
    if not begun or not output.may_begin(begun, spellings):
        return False
    drop_begun(cursor, output)
    return True


def closing(cursor: Cursor, mark: str) -> Steps[None]:
    """The mark behind a whole call, if it is there; what there is of it when it was cut."""
    if not (yield from cursor.literal(mark)) and cursor.cut:
        cursor.discard()


def drop_begun(cursor: Cursor, output: Output) -> None:
    """What is recorded and held began a call that was cut."""
    cursor.discard()
    cursor.recorded()
    output.cut()


def call_list(cursor: Cursor, output: Output, needs_arguments: bool) -> Steps[None]:
    """A JSON array of calls, from its `[`, and whitespace behind it. The caller has begun a recording; what is no call
    is content from there."""
    more = yield from cursor.literal("[")
    while more:
        yield from cursor.space()
        if not (yield from call_or_text(cursor, output, needs_arguments)):
            return
        yield from cursor.space()
        cursor.record("")
        more = yield from cursor.literal(",")
    cursor.recorded()
    if (yield from cursor.literal("]")):
        yield from cursor.space()


def call_sequence(cursor: Cursor, output: Output, needs_arguments: bool) -> Steps[None]:
    """Call objects one behind the other, apart by whitespace or `;`. A recording has begun."""
    while (yield from call_or_text(cursor, output, needs_arguments)):
        yield from cursor.space()
        cursor.record("")
        yield from cursor.literal(";")
        yield from cursor.space()
        if (yield from cursor.peek()) != "{":
            if not cut_call(cursor, output, lambda name: (";",)):
                output.content(cursor.recorded())
            return


def may_begin_arguments(cursor: Cursor, markup: str = "<") -> Steps[bool]:
    """Whether what follows a call's header, white space apart, can be its arguments: an object, or markup, which begins
    with one of the characters `markup`, or the end of the text, where the call is cut. Anything else makes no call;
    asked before the call is begun, it stays text."""
    yield from cursor.space()
    return (yield from cursor.peek()) in ("{", *markup, "")


def marked_arguments(cursor: Cursor, output: Output, end: str | None, fenced: bool = False) -> Steps[None]:
    """The arguments of the open call as a JSON object, and the call's end marker (None: it has none).

    No value at all stands for no arguments. Args: fenced: a code fence may close behind the value.
    """
    yield from cursor.space()
    if end is not None and (yield from cursor.literal(end)):
        output.arguments("{}")
        output.end()
        return
    if (yield from cursor.peek()) != "{" or not (yield from cursor.json_value(output.arguments)):
        give_up(cursor, output)
        return
    yield from cursor.space()
    if fenced and (yield from cursor.literal("```")):
        yield from cursor.space()
    if end is None or (yield from cursor.literal(end)) or not cursor.ended:
        output.end()
    else:
        give_up(cursor, output)


def give_up(cursor: Cursor, output: Output) -> None:
    """The open call cannot go on. Malformed: the rest is content. Cut: unfinished markup is dropped, `Output.finish`
    judges the call. A question fails for want of text only when the text has ended, for any split of it."""
    if cursor.ended:
        cursor.discard()
    else:
        output.abandon()


class _CallObject:
    def __init__(self, cursor: Cursor, output: Output, needs_arguments: bool) -> None:
        self._cursor = cursor
        self._output = output
        self._needs_arguments = needs_arguments
        self._name: str | None = None
        self._name_begun = ""  # what there is of the JSON of a name that was cut
        self._own_id: str | None = None
        self._started = False
        self._early: str | None = None  # arguments that came before the name

    def read(self) -> Steps[Found]:
        cursor = self._cursor
        if not (yield from cursor.literal("{")):
            return self._give_up()
        while True:
            yield from cursor.space()
            if (yield from cursor.literal("}")):
                return self._close()
            if not (yield from self._member()):
                return self._give_up()
            yield from cursor.space()
            if not (yield from cursor.literal(",")) and (yield from cursor.peek()) != "}":
                return self._give_up()

    def _member(self) -> Steps[bool]:
        cursor = self._cursor
        key = yield from cursor.json_string(MAX_NAME_CHARS)
        if key is None:
            return False
        yield from cursor.space()
        if not (yield from cursor.literal(":")):
            return False
        yield from cursor.space()
        if key == "name":
            if self._name is not None:
                return False
            self._name = yield from cursor.json_string(MAX_NAME_CHARS, self._note_begun)
            return self._name is not None and self._output.accepts(self._name)
        if key in _ARGUMENTS:
            if self._started or self._early is not None:
                return False
            return (yield from self._arguments())
        if key == "id" and not self._started:
            return (yield from self._identity())
        return (yield from cursor.json_value(drop))

    def _arguments(self) -> Steps[bool]:
        """Streams an object, or keeps it while the name is unknown. A string that holds an object is unpacked, null is
        an empty object; with any other value it is no call."""
        is_object = (yield from self._cursor.peek()) == "{"
        if is_object and self._name is not None:
            self._start()
            return (yield from self._cursor.json_value(self._output.arguments))
        parts: list[str] = []
        whole = yield from self._cursor.json_value(parts.append)
        text: str | None = "".join(parts)
        if not is_object:
            text = _unpacked("".join(parts)) if whole else ""
        if text is None:
            return False
        if self._name is None:
            self._early = text
        elif whole or self._cursor.ended:  # cut, it is a call that lacks its arguments
            self._start()
            self._output.arguments(text)
        return whole

    def _identity(self) -> Steps[bool]:
        parts: list[str] = []
        whole = yield from self._cursor.json_value(parts.append)
        self._own_id = (decode_string("".join(parts)) if whole else None) or None
        return whole

    def _start(self) -> None:
        assert self._name is not None
        self._cursor.recorded()
        self._output.start(self._name, self._own_id if self._output.keeps_ids else None)
        self._started = True

    def _close(self) -> Found:
        if not self._started:
            if self._name is None or (self._needs_arguments and self._early is None):
                return "text"
            self._start()
            self._output.arguments(self._early or "{}")
        self._output.end()
        return "call"

    def _give_up(self) -> Found:
        if not self._started:
            return "cut" if self._cursor.cut and self._may_be_call() else "text"
        give_up(self._cursor, self._output)
        return "broken"

    def _note_begun(self, raw: str) -> None:
        self._name_begun = raw

    def _may_be_call(self) -> bool:
        """Of an object that was cut. Where no markup says that it is a call, a function's name must have begun."""
        if self._name is not None:
            return self._output.accepts(self._name)
        begun = decode_string(self._name_begun + '"') or ""
        is_marked = not self._needs_arguments or self._output.num_calls > 0
        return self._output.may_call(begun) and (is_marked or begun != "")


def _unpacked(raw: str) -> str | None:
    """The object that a JSON text other than an object stands for; None: it stands for none."""
    if raw == "null":
        return "{}"
    text = decode_string(raw)
    if text is None:
        return None
    if not text.strip():
        return "{}"
    return None if json_object(text) is None else text
