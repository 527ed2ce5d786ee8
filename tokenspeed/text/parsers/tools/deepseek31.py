"""DeepSeek V3.1: the name, the separator and the arguments as JSON.

Source: the chat template on the model card. It puts nothing between content and the calls.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, marked_arguments
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.sectioned import sectioned

_SEPARATOR = Markers("<｜tool▁sep｜>")


def _header(cursor: Cursor) -> Steps[str | None]:
    name = yield from cursor.within(_SEPARATOR, MAX_NAME_CHARS)
    return None if name is None else name[0].strip()


def _body(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    yield from marked_arguments(cursor, output, "<｜tool▁call▁end｜>")


def _spellings(name: str) -> tuple[str]:
    return (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",)


def why_not(traits: ModelTraits) -> str | None:
    """The template writes the separator; with a fence it is V3's format."""
    if "```json" in traits.template:
        return "the chat template fences arguments with ```json"
    return traits.missing("<｜tool▁sep｜>")


FORMAT = ToolFormat(
    names=("deepseek31", "deepseek_v31"),
    make=grammar_format(
        sectioned(
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁call▁begin｜>", _header, _body, _spellings
        ),
        trims=False,
    ),
    why_not=why_not,
    rank=20,
    needs_special_tokens=True,
    marks=CallMarks(
        "<｜tool▁call▁begin｜>",
        lambda name: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="",
    ),
)

EXAMPLES = (
    Example("Only text", "Only text"),
    Example(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a.b-c<｜tool▁sep｜>{"x": "{\\"y\\": \\"ж\\"}"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"n": [1, 2.5, true]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=(("a.b-c", {"x": '{"y": "ж"}'}), ("g", {"n": [1, 2.5, True]})),
    ),
    Example(
        "Text <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "Text <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        tools=(ToolSpec("g"),),
    ),
    Example(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a',
        calls=(("f", '{"a'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "A<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
