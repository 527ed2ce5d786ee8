"""Qwen3-Coder, Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Source: the chat templates on the model cards. Values are text; the tool's schema says what they are. One newline at
either end of a value is markup, and so is whitespace around tags. `<function=` without `<tool_call>` counts too, and
`</tool_call>` without `</function>`: the models forget them. They forget `</parameter>`, too, so that a value also ends
with the next tag. A parameter that the schema does not name is a string.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ParameterMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, closing, cut_call, give_up
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import STRING, ObjectWriter, ValueEnd, member_kinds

_OPEN = Markers("<tool_call>", "<function=")
_TAG_END = Markers(">")
_VALUE_END = ValueEnd("</parameter>", "<parameter=", "</function>", "</tool_call>")


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Any number of calls, text between."""
    tail = "<function" if output.may_call("") else ""  # no text ends so
    while (mark := (yield from cursor.until(_OPEN, output.content, special=tail))) is not None:
        cursor.record(mark)
        name = yield from _name(cursor, mark)
        if name is None or not output.accepts(name):
            if not cut_call(cursor, output, _spellings):
                output.content(cursor.recorded())
            continue
        cursor.recorded()
        output.start(name)
        yield from _parameters(cursor, output, name)
        yield from cursor.space()


def _name(cursor: Cursor, mark: str) -> Steps[str | None]:
    if mark == "<tool_call>":
        yield from cursor.space()
        if not (yield from cursor.literal("<function=")):
            return None
    tag = yield from cursor.within(_TAG_END, MAX_NAME_CHARS)
    return None if tag is None else tag[0].strip()


def _spellings(name: str) -> tuple[str, str]:
    return f"<tool_call><function={name}>", f"<function={name}>"


def _parameters(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    writer = ObjectWriter(output)
    yield from cursor.space()
    while (yield from cursor.literal("<parameter=")):
        tag = yield from cursor.within(_TAG_END, MAX_NAME_CHARS)
        if tag is None:
            give_up(cursor, output)
            return
        key = tag[0].strip()
        kinds = member_kinds(output.parameters(name), key) or STRING
        if not (yield from writer.member(cursor, key, kinds, _VALUE_END, line=True)):
            return
        yield from cursor.space()
    if (yield from cursor.literal("</function>")):
        writer.close()
        yield from cursor.space()
        yield from closing(cursor, "</tool_call>")
    elif (yield from cursor.literal("</tool_call>")):
        writer.close()
    else:
        give_up(cursor, output)


def why_not(traits: ModelTraits) -> str | None:
    """The template shows the tags."""
    return traits.missing("<function=", "<parameter=")


FORMAT = ToolFormat(
    names=("qwen_coder", "qwen_xml", "qwen3_coder"),
    make=grammar_format(grammar),
    why_not=why_not,
    rank=40,
    marks=CallMarks(
        "<tool_call>",
        lambda name: f"<tool_call>\n<function={name}>",
        "</function>\n</tool_call>",
        separator="\n",
        banned=("<function=",),
        parameters=ParameterMarks(("<parameter=", (">",)), _VALUE_END.own, _VALUE_END.next_tags, line=True),
    ),
)

_WRITE = ToolSpec(
    "write-file.v1",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "integer"},
            "ratio": {"type": "number"},
            "force": {"type": "boolean"},
            "tags": {"type": "array"},
            "meta": {"$ref": "#/$defs/meta"},
            "owner": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"meta": {"type": "object"}},
    },
)

EXAMPLES = (
    Example("Use <b>, a < b and </parameter>.", "Use <b>, a < b and </parameter>."),
    Example(
        'I write.\n<tool_call>\n<function=write-file.v1>\n<parameter=path>\na "b"\\c\n\n</parameter>\n'
        "<parameter=lines>\n 12 \n</parameter>\n<parameter=force>\nTrue\n</parameter>\n"
        '<parameter=tags>\n[\'x\', None, "y"]\n</parameter>\n<parameter=meta>\n{"k": {"v": [1]}}\n</parameter>\n'
        "<parameter=owner>\nNone\n</parameter>\n"
        "<parameter=ratio>\n2\n</parameter>\n</function>\n</tool_call>",
        "I write.",
        calls=(
            (
                "write-file.v1",
                {
                    "path": 'a "b"\\c\n',
                    "lines": 12,
                    "force": True,
                    "tags": ["x", None, "y"],
                    "meta": {"k": {"v": [1]}},
                    "owner": None,
                    "ratio": 2,
                },
            ),
        ),
        tools=(_WRITE,),
    ),
    Example(
        "<function=f>\n</function>\n<tool_call><function=g><parameter=x>5</parameter></function></tool_call> done",
        "done",
        calls=(("f", {}), ("g", {"x": "5"})),
    ),
    Example("<tool_call><function=f><parameter=x>5</parameter></tool_call>", calls=(("f", {"x": "5"}),)),
    # As other engines read it: a forgotten `</parameter>` does not make the next parameter a part of the value.
    Example(
        "<tool_call>\n<function=write-file.v1>\n<parameter=path>Paris\n<parameter=lines>\n3\n</parameter></function>",
        calls=(("write-file.v1", {"path": "Paris", "lines": 3}),),
        tools=(_WRITE,),
    ),
    Example(
        "<tool_call>\n<function=f>\n<parameter=x>\na<b>\n<parameter=y>c\n\n</function>\n</tool_call> done",
        "done",
        calls=(("f", {"x": "a<b>", "y": "c\n"}),),
    ),
    Example("<tool_call><function=f><parameter=x>5</tool_call>", calls=(("f", {"x": "5"}),)),
    Example(
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        tools=(_WRITE,),
    ),
    Example(
        "<tool_call>\n<function=write-file.v1>\n<parameter=path>\n/tmp/x\ny",
        calls=(("write-file.v1", '{"path": "/tmp/x\\ny'),),
        tools=(_WRITE,),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "<tool_call>\n<function=write-file.v1>\n<parameter=lines>\n12",
        calls=(("write-file.v1", ""),),
        tools=(_WRITE,),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "A\n<tool_call>\n<function=weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
