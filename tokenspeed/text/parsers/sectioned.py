"""The shape that several formats share: calls with a begin marker, mostly inside a marked section.

Text outside of calls is content. Section markers are markup and are never content; whitespace behind any of the markers
is markup too, and so is a header that the length limit cut.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.json_call import cut_call, may_begin_arguments
from tokenspeed.text.parsers.machine import Grammar
from tokenspeed.text.parsers.output import Output, Spellings

Header = Callable[[Cursor], Steps[str | None]]
"""Reads what stands between a call's begin marker and its arguments: the name, or None if it is no header."""

Body = Callable[[Cursor, Output, str], Steps[None]]
"""Reads the arguments and the end of the open call (of the function named). They begin with `{` or `<`."""


def sectioned(
    section: tuple[str, ...], call_begin: str, header: Header, body: Body, spellings: Spellings, special: str = ""
) -> Grammar:
    """The grammar of such a format.

    Args:
        section: the markers around the calls.
        spellings: of headers, with the begin marker.
        special: a special token in all markers, which are more than that.
    """
    marks = Markers(*section, call_begin)

    def grammar(cursor: Cursor, output: Output) -> Steps[None]:
        tail = special if output.may_call("") else ""
        while (mark := (yield from cursor.until(marks, output.content, special=tail))) is not None:
            if mark == call_begin:
                cursor.record(mark)
                name = yield from header(cursor)
                if name is None or not output.accepts(name) or not (yield from may_begin_arguments(cursor)):
                    if not cut_call(cursor, output, spellings):
                        output.content(cursor.recorded())
                    continue
                cursor.recorded()
                output.start(name)
                yield from body(cursor, output, name)
            yield from cursor.space()

    return grammar
