"""DeepSeek V3 and R1: `function`, the separator, the name on its own line and the arguments in a fenced JSON block.

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
_LINE = Markers("\n")


def _header(cursor: Cursor) -> Steps[str | None]:
    kind = yield from cursor.within(_SEPARATOR, MAX_NAME_CHARS)
    if kind is None or kind[0].strip() != "function":
        return None
    name = yield from cursor.within(_LINE, MAX_NAME_CHARS)
    if name is None:
        return None
    yield from cursor.space()
    if (yield from cursor.literal("```")):
        yield from cursor.literal("json")
    return name[0].strip()


def _body(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    yield from marked_arguments(cursor, output, "<｜tool▁call▁end｜>", fenced=True)


def _spellings(name: str) -> tuple[str]:
    return (f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json{{",)


def why_not(traits: ModelTraits) -> str | None:
    """The template writes the separator and the fence."""
    return traits.missing("<｜tool▁sep｜>", "```json")


FORMAT = ToolFormat(
    names=("deepseek", "deepseek_v3"),
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
        lambda name: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="\n",
    ),
)

EXAMPLES = (
    Example("Nur Text mit ``` und <｜x｜>", "Nur Text mit ``` und <｜x｜>"),
    Example(
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get.the-weather\n```json\n"
        '{"city": "Zürich", "note": "```\\n}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok.",
        calls=(("get.the-weather", {"city": "Zürich", "note": "```\n}"}), ("g", {})),
    ),
    Example(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        tools=(ToolSpec("g"),),
    ),
    Example(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x',
        calls=(("f", '{"a": "x'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "A<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
