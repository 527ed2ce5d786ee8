"""Qwen 2.5 and 3, Hermes: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`.

Source: the chat templates on the model cards. They trim content and put newlines around the tags, so whitespace there
is markup. What stands in the tags and is no call on offer stays content, tags included.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import call_or_text, closing
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import dumps

_OPEN = Markers("<tool_call>")


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Any number of calls, text between."""
    while (mark := (yield from cursor.until(_OPEN, output.content))) is not None:
        cursor.record(mark)
        yield from cursor.space()
        if (yield from call_or_text(cursor, output, needs_arguments=False)):
            yield from cursor.space()
            yield from closing(cursor, "</tool_call>")
            yield from cursor.space()


def why_not(traits: ModelTraits) -> str | None:
    """The template shows the tags with JSON between."""
    return traits.missing("<tool_call>", "arguments")


def _begin(name: str) -> str:
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": '


FORMAT = ToolFormat(
    names=("qwen", "qwen25", "hermes"),
    make=grammar_format(grammar),
    why_not=why_not,
    rank=60,
    marks=CallMarks("<tool_call>", _begin, "}\n</tool_call>", separator="\n"),
)

EXAMPLES = (
    Example('Just an answer with <b>tags</b>, { and "quotes".', 'Just an answer with <b>tags</b>, { and "quotes".'),
    Example(
        'Let me look.\n\n<tool_call>\n{"name": "get-weather.v2", "arguments": {"city": "Zürich 🏔", "days": [1, 2]}}\n'
        "</tool_call>",
        "Let me look.",
        calls=(("get-weather.v2", {"city": "Zürich 🏔", "days": [1, 2]}),),
    ),
    Example(
        '<tool_call>\n{"arguments": {"a": "}{ \\" </tool_call> \\\\"}, "name": "f"}\n</tool_call>\n<tool_call>\n'
        '{"name": "g", "arguments":\n{\n "x" : null }\n}\n</tool_call>\nDone.',
        "Done.",
        calls=(("f", {"a": '}{ " </tool_call> \\'}), ("g", {"x": None})),
    ),
    Example('<tool_call>{"name": "f"}</tool_call>', calls=(("f", {}),)),
    Example('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=(("f", {"a": 1}),)),
    Example(
        '<tool_call>{"n\\u0061me": "\\u0066", "argum\\u0065nts": {"\\u0061": 1, "b": 3, "a": 2}}</tool_call>',
        calls=(("f", {"a": 2, "b": 3}),),
    ),
    Example(
        '<tool_call>{"arguments": {}, "name": "f", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "f", "parameters": {"a": 1}}</tool_call>',
    ),
    Example(
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "n\\u0061me": "g"}</tool_call>',
        '"g"}</tool_call>',
        calls=(("f", '{"a": 1}'),),
        incomplete=True,
    ),
    Example(
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>',
        "{}}</tool_call>",
        calls=(("f", '{"a": 1}'),),
        incomplete=True,
    ),
    Example("the `<tool_call>` tag ", "the `<tool_call>` tag "),
    Example(
        '<tool_call>\n{"name": "nope", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "nope", "arguments": {"a": 1}}\n</tool_call>',
        tools=(ToolSpec("f"),),
    ),
    Example(
        'So: <tool_call>\n{"name": "f", "arguments": {"path": "a/b',
        "So:",
        calls=(("f", '{"path": "a/b'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>',
        "]}</tool_call>",
        calls=(("f", '{"a": 1'),),
        incomplete=True,
    ),
    Example(
        'A <tool_call>\n{"name": "weath',
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
