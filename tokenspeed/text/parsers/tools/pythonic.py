"""Pythonic calls: the output is a Python list of calls with literal keyword arguments: `[f(a=1), g(b="x")]`.

Source: Meta's prompt formats for Llama 3.2 and 4 (there maybe between `<|python_start|>` and `<|python_end|>`). Text
that does not begin so is content. Values become JSON; strings go out as they come. A value that is no literal ends the
call as malformed.
"""

from __future__ import annotations

import math
import re

from tokenspeed.text.parsers import python_literal
from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import Example, ModelTraits, OpeningMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, cut_call, give_up
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import dumps

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_START = "<|python_start|>"
_BEHIND_NAME = Markers("(")
_BEHIND_KEY = Markers("=")


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """One list of calls; what follows it is content."""
    cursor.record("")
    yield from cursor.space()
    yield from cursor.literal(_START)
    yield from cursor.space()
    more = yield from cursor.literal("[")
    if not more:  # then a closing bracket closes nothing: it is text like any other
        if not _cut(cursor, output):
            output.content(cursor.recorded())
        return
    while more:
        yield from cursor.space()
        found = yield from cursor.within(_BEHIND_NAME, MAX_NAME_CHARS)
        name = "" if found is None else found[0]
        if not _NAME.fullmatch(name) or not output.accepts(name):
            break
        cursor.recorded()
        output.start(name)
        if not (yield from _arguments(cursor, output)):
            return
        yield from cursor.space()
        cursor.record("")
        more = yield from cursor.literal(",")
    if more or not (yield from cursor.literal("]")):
        if not _cut(cursor, output):
            output.content(cursor.recorded())
        return
    cursor.recorded()
    yield from cursor.space()
    yield from cursor.literal("<|python_end|>")
    yield from cursor.space()


def _cut(cursor: Cursor, output: Output) -> bool:
    """`cut_call`; where neither tag nor call is in front, a function's name must have begun: `[` begins much."""
    begun = cursor.begun().strip()
    is_certain = output.num_calls > 0 or begun.startswith(_START) or begun[1:].strip() != ""
    return is_certain and cut_call(cursor, output, _spellings)


def _spellings(name: str) -> tuple[str, str, str]:
    return f"[{name}(", f"{_START}[{name}(", f",{name}("


def _arguments(cursor: Cursor, output: Output) -> Steps[bool]:
    """Up to and with the closing bracket; True for a whole call."""
    lead = "{"
    keys: set[str] = set()
    yield from cursor.space()
    while not (yield from cursor.literal(")")):
        key = yield from cursor.within(_BEHIND_KEY, MAX_NAME_CHARS)
        if key is None or not key[0].strip().isidentifier() or key[0].strip() in keys:  # Python refuses these, too
            give_up(cursor, output)
            return False
        keys.add(key[0].strip())
        yield from cursor.space()
        if not (yield from _value(cursor, output, f"{lead}{dumps(key[0].strip())}: ")):
            give_up(cursor, output)
            return False
        yield from cursor.space()
        if not (yield from cursor.literal(",")) and (yield from cursor.peek()) != ")":
            give_up(cursor, output)
            return False
        yield from cursor.space()
        lead = ", "
    output.arguments("{}" if lead == "{" else "}")
    output.end()
    return True


def _value(cursor: Cursor, output: Output, head: str) -> Steps[bool]:
    first = yield from cursor.peek()
    if first in ('"', "'"):
        output.arguments(head + '"')
        whole = yield from python_literal.string(cursor, output.arguments)
        output.arguments('"' if whole else "")
        return whole
    text = yield from python_literal.expression(cursor)
    output.arguments("" if text is None else head + text)
    return text is not None


def why_not(traits: ModelTraits) -> str | None:
    """The template shows the form."""
    return traits.missing("[func_name1(")


FORMAT = ToolFormat(
    names=("pythonic",),
    make=grammar_format(grammar),
    why_not=why_not,
    rank=20,
    needs_special_tokens=True,
    openings=OpeningMarks("python", around=(_START, "<|python_end|>")),
)

EXAMPLES = (
    Example("[see](http://x) and [1, 2] ", "[see](http://x) and [1, 2] "),
    Example(
        "[get.the-weather(city='Zü\"rich\\n', days=[1, -2.5, (True, None)], o={'k': \"v)\", 2: false}), g()]",
        calls=(
            (
                "get.the-weather",
                {"city": 'Zü"rich\n', "days": [1, -2.5, [True, None]], "o": {"k": "v)", "2": False}},
            ),
            ("g", {}),
        ),
    ),
    Example(
        '<|python_start|>[ f( a = """x "y"\n\\x41\\u00e9\\N{BULLET}\\101\\q""" \'z\', b=True , ) ]<|python_end|> Text',
        "Text",
        calls=(("f", {"a": 'x "y"\nAé•A\\qz', "b": True}),),
    ),
    Example('[f(n=1e400, o={"k": "\\ud83d\\ude00"})]', calls=(("f", {"n": math.inf, "o": {"k": "😀"}}),)),
    Example("[f(a=1)]", "[f(a=1)]", tools=(ToolSpec("g"),)),
    Example("[f(a=1, a=2)] t", "2)] t", calls=(("f", '{"a": 1'),), incomplete=True),
    Example("[f(a=1, b=x.y)] t", ")] t", calls=(("f", '{"a": 1'),), incomplete=True),
    Example('[f(a="lo', calls=(("f", '{"a": "lo'),), finish_reason="length", incomplete=True),
    Example(
        "[weath",
        "",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
