"""No tool calls: all text is content."""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Steps
from tokenspeed.text.parsers.interface import Example, ModelTraits, ToolFormat
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Nothing to find."""
    yield from ()


def why_not(traits: ModelTraits) -> str | None:
    """The last resort of `auto`."""
    return None


FORMAT = ToolFormat(names=("passthrough",), make=grammar_format(grammar, trims=False), why_not=why_not, rank=100)

EXAMPLES = (
    Example("", ""),
    Example(
        ' <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> ',
        ' <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> ',
    ),
)
