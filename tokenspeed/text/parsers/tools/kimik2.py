"""Kimi K2 and K2.5: a section of calls, each `functions.NAME:IDX`, the argument mark and JSON.

Source: the tool call guidance on the model card. The id is `functions.NAME:N` with N counted over the whole
conversation: the template writes ids into the prompt and the model was trained on that form. The template puts nothing
between content and section, so whitespace in front of the section stays content.
"""

from __future__ import annotations

import re

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ParseContext, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, marked_arguments
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.sectioned import sectioned

SECTION_BEGIN = "<|tool_calls_section_begin|>"
_ARGUMENTS = Markers("<|tool_call_argument_begin|>")
_NUMBER = re.compile(r":\d+$")


def _id(context: ParseContext, name: str, index: int) -> str:
    return f"functions.{name}:{context.history_calls + index}"


def _header(cursor: Cursor) -> Steps[str | None]:
    found = yield from cursor.within(_ARGUMENTS, MAX_NAME_CHARS)
    return None if found is None else _NUMBER.sub("", found[0].strip().removeprefix("functions."))


def _body(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    yield from marked_arguments(cursor, output, "<|tool_call_end|>")


def _spellings(name: str) -> tuple[str, str]:
    begin, end = "<|tool_call_begin|>", ":<|tool_call_argument_begin|>"
    return f"{begin}functions.{name}{end}", f"{begin}{name}{end}"


def why_not(traits: ModelTraits) -> str | None:
    """The template writes the section."""
    return traits.missing(SECTION_BEGIN)


FORMAT = ToolFormat(
    names=("kimik2", "kimi_k2"),
    make=grammar_format(
        sectioned((SECTION_BEGIN, "<|tool_calls_section_end|>"), "<|tool_call_begin|>", _header, _body, _spellings),
        ids=_id,
        trims=False,
    ),
    why_not=why_not,
    rank=10,
    needs_special_tokens=True,
    ids=_id,
    marks=CallMarks(
        "<|tool_call_begin|>",
        lambda name: f"<|tool_call_begin|>functions.{name}:",
        "<|tool_call_end|>",
        behind_number="<|tool_call_argument_begin|>",
        section=(SECTION_BEGIN, "<|tool_calls_section_end|>"),
    ),
)

EXAMPLES = (
    Example("Hi <|x|> there ", "Hi <|x|> there "),
    Example(
        "I check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get-the.weather:0"
        '<|tool_call_argument_begin|>{"city": "北京", "q": "\\"}"}<|tool_call_end|><|tool_call_begin|>functions.g:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I check. ",
        calls=(("get-the.weather", {"city": "北京", "q": '"}'}), ("g", {})),
    ),
    Example(
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nf:3\n<|tool_call_argument_begin|><|tool_call_end|>\n"
        "<|tool_calls_section_end|>\nafter",
        "after",
        calls=(("f", {}),),
    ),
    Example(
        '<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        '<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        tools=(ToolSpec("y"),),
    ),
    Example(
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": {"b": 1}',
        calls=(("f", '{"a": {"b": 1}'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}',
        calls=(("f", {"a": 1}),),
    ),
    Example(
        "A <|tool_calls_section_begin|><|tool_call_begin|>functions.weath",
        "A ",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
