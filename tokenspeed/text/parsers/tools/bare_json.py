"""Bare JSON: the whole output is an object or an array of objects with name and arguments (or parameters).

This is what `tool_choice` required or named makes the grammar produce. Text that does not begin so is content, and so
is an object without arguments: there is no markup that says it was meant as a call.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Steps
from tokenspeed.text.parsers.interface import CallId, Example, OpeningMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import call_list, call_sequence, text_or_cut
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Calls from the first character on that is not whitespace."""
    cursor.record("")
    yield from cursor.space()
    first = yield from cursor.peek()
    if first == "[":
        yield from call_list(cursor, output, needs_arguments=True)
    elif first == "{":
        yield from call_sequence(cursor, output, needs_arguments=True)
    else:
        text_or_cut(cursor, output)


def forced_calls(ids: CallId) -> ToolFormat:
    """This format with a family's form of ids: for calls that a grammar forced. A call that was cut before its
    arguments began is dropped: it is no content."""
    return ToolFormat(names=("json",), make=grammar_format(grammar, ids=ids, is_forced=True), ids=ids)


FORMAT = ToolFormat(names=("json",), make=grammar_format(grammar), openings=OpeningMarks("object", arrays=True))

EXAMPLES = (
    Example("Hello [1] {x}", "Hello [1] {x}"),
    Example('{"name": "a-b.c", "arguments": {"x": "é\\u00e9 \\"q\\""}}', calls=(("a-b.c", {"x": 'éé "q"'}),)),
    Example(
        '\n[{"name": "f", "parameters": {"x": [1, {"y": "]"}]}} , {"name": "g", "parameters": {}}]\n',
        calls=(("f", {"x": [1, {"y": "]"}]}), ("g", {})),
    ),
    Example(
        '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1.5e3}} and text',
        "and text",
        calls=(("f", {}), ("g", {"a": 1500.0})),
    ),
    Example('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    Example('{"answer": {"name": "f", "arguments": {}}}', '{"answer": {"name": "f", "arguments": {}}}'),
    Example("[1, 2]", "[1, 2]"),
    Example('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1}}', tools=(ToolSpec("g"),)),
    Example(
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": tr',
        calls=(("f", '{"a": 1}'), ("g", '{"b": tr')),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        '[{"name": "weath',
        "",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
