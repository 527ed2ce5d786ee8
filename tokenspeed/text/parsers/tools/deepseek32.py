"""DeepSeek V3.2 (`function_calls`) and V4 (`tool_calls`): DSML tags around typed parameters.

Source: the encoding module published with the V3.2 weights. A parameter with string="true" is the raw text of a string,
with "false" it is JSON; an invoke may also hold one JSON object in place of parameters. Blank lines around the tags are
markup.
"""

from __future__ import annotations

from typing import get_args

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ParameterMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, give_up, marked_arguments
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.sectioned import sectioned
from tokenspeed.text.parsers.typed_arguments import NOT_STRING, STRING, Kind, ObjectWriter, ValueEnd

_SECTION = tuple(f"<{slash}｜DSML｜{word}>" for word in ("function_calls", "tool_calls") for slash in ("", "/"))
_INVOKE = '<｜DSML｜invoke name="'
_INVOKE_END = "</｜DSML｜invoke>"
_PARAMETER = '<｜DSML｜parameter name="'
_PARAMETER_END = ValueEnd("</｜DSML｜parameter>", "<｜DSML｜parameter name=", _INVOKE_END)
_TAG_END = Markers('">')


def _header(cursor: Cursor) -> Steps[str | None]:
    name = yield from cursor.within(_TAG_END, MAX_NAME_CHARS)
    return None if name is None else name[0]


def _body(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    yield from cursor.space()
    if (yield from cursor.peek()) == "{":
        yield from marked_arguments(cursor, output, _INVOKE_END)
        return
    writer = ObjectWriter(output)
    while (yield from cursor.literal(_PARAMETER)):
        tag = yield from cursor.within(_TAG_END, MAX_NAME_CHARS)
        key, mark, is_string = ("", "", "") if tag is None else tag[0].rpartition('" string="')
        if not mark or is_string not in ("true", "false"):
            give_up(cursor, output)
            return
        kinds = STRING if is_string == "true" else NOT_STRING
        if not (yield from writer.member(cursor, key, kinds, _PARAMETER_END)):
            return
        yield from cursor.space()
    if (yield from cursor.literal(_INVOKE_END)):
        writer.close()
    else:
        give_up(cursor, output)


def _spellings(name: str) -> tuple[str]:
    return (f'{_INVOKE}{name}">',)


def why_not(traits: ModelTraits) -> str | None:
    """The template, or the architecture whose encoding is a module and no template."""
    if traits.architecture in ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"):
        return None
    return traits.missing("｜DSML｜")


FORMAT = ToolFormat(
    names=("deepseek32", "deepseek_v32", "deepseek_v4"),
    make=grammar_format(sectioned(_SECTION, _INVOKE, _header, _body, _spellings, special="｜DSML｜")),
    why_not=why_not,
    rank=10,
    needs_special_tokens=True,
    marks=CallMarks(
        _INVOKE,
        lambda name: f'{_INVOKE}{name}">',
        _INVOKE_END,
        section=None,
        parameters=ParameterMarks(
            (_PARAMETER, ()),
            _PARAMETER_END.own,
            _PARAMETER_END.next_tags,
            by_type={kind: (f'" string="{"true" if kind == "string" else "false"}">',) for kind in get_args(Kind)},
            whole=("", ""),
        ),
    ),
)

EXAMPLES = (
    Example("a <b> c", "a <b> c"),
    Example(
        'Moment.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get-w.x">\n'
        '<｜DSML｜parameter name="city" string="true">'
        'Zürich "alt"\n </｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1, {"a": null}]'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "Moment.",
        calls=(("get-w.x", {"city": 'Zürich "alt"\n ', "n": [1, {"a": None}]}), ("g", {})),
    ),
    Example(
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f">{"a": "</｜DSML｜invoke>"}</｜DSML｜invoke></｜DSML｜tool_calls>',
        calls=(("f", {"a": "</｜DSML｜invoke>"}),),
    ),
    Example(  # a forgotten end of a value
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">b\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜invoke>',
        calls=(("f", {"a": "b", "n": 3}),),
    ),
    Example(
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        tools=(ToolSpec("g"),),
    ),
    Example(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">some te',
        calls=(("f", '{"a": "some te'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        'A\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weath',
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
