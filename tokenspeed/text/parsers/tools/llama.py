"""Llama 3: `<|python_tag|>{"name": ..., "parameters": {...}}`, several apart by `;`; the tag may be missing.

Source: Meta's prompt format pages for 3.1 to 3.3. Without the tag the object must be the first thing in the output and
have parameters. Code behind the tag (the built-in tools) is content.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import Example, ModelTraits, OpeningMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import call_sequence, cut_call
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import dumps

_TAG = Markers("<|python_tag|>")


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Calls at the beginning or behind the tag."""
    mark: str | None = ""
    while mark is not None:
        cursor.record(mark)
        yield from cursor.space()
        if (yield from cursor.peek()) == "{":
            yield from call_sequence(cursor, output, needs_arguments=mark == "")
        elif mark == "" or not cut_call(cursor, output, _spellings):
            output.content(cursor.recorded())
        mark = yield from cursor.until(_TAG, output.content)


def _spellings(name: str) -> tuple[str]:
    return (f'<|python_tag|>{{"name": {dumps(name)}',)


def why_not(traits: ModelTraits) -> str | None:
    """The template asks for name and parameters, and knows the code role."""
    return traits.missing('"parameters"', "ipython")


FORMAT = ToolFormat(
    names=("llama", "llama3_json"),
    make=grammar_format(grammar),
    why_not=why_not,
    rank=50,
    needs_special_tokens=True,
    openings=OpeningMarks("object", tag="<|python_tag|>"),
)

EXAMPLES = (
    Example("Plain text.", "Plain text."),
    Example('<|python_tag|>{"name": "f.x-y", "parameters": {"q": "a; b"}}', calls=(("f.x-y", {"q": "a; b"}),)),
    Example(
        '{"name": "f", "parameters": {"q": "ü"}}; {"name": "g", "parameters": {"n": -1}}',
        calls=(("f", {"q": "ü"}), ("g", {"n": -1})),
    ),
    Example('I look: <|python_tag|>{"name": "f"}', "I look:", calls=(("f", {}),)),
    Example('<|python_tag|>print("hi")', '<|python_tag|>print("hi")'),
    Example('{"name": "x"}', '{"name": "x"}'),
    Example('<|python_tag|>{"name": "f"}', '<|python_tag|>{"name": "f"}', tools=(ToolSpec("g"),)),
    Example(
        '<|python_tag|>{"name": "f", "parameters": {"q": "\\',
        calls=(("f", '{"q": "\\'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        'A <|python_tag|>{"name": "weath',
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
