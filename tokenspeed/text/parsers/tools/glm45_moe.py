"""GLM 4.5 and later: `<tool_call>NAME`, then `<arg_key>`/`<arg_value>` pairs; newlines between (4.5) or none (4.7).

Source: the chat templates on the model cards: strings stand raw in `<arg_value>`, all else as JSON. The tool's schema
says which; a value that it does not name is JSON if it reads as such, else a string. Whitespace around tags is markup.
Where `</arg_value>` is forgotten, a value ends with the next tag.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ParameterMarks, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, cut_call, give_up
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import ANY, ObjectWriter, ValueEnd, member_kinds

_OPEN = Markers("<tool_call>")
_BEHIND_NAME = Markers("<arg_key>", "</tool_call>", "<tool_call>")
_KEY_END = Markers("</arg_key>")
_VALUE_END = ValueEnd("</arg_value>", "<arg_key>", "</tool_call>")


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Any number of calls, text between."""
    while (mark := (yield from cursor.until(_OPEN, output.content))) is not None:
        cursor.record(mark)
        header = yield from cursor.within(_BEHIND_NAME, MAX_NAME_CHARS, leave=True)
        if header is None or header[1] == "<tool_call>" or not output.accepts(header[0].strip()):
            if not cut_call(cursor, output, _spellings):
                output.content(cursor.recorded())
            continue
        cursor.recorded()
        name = header[0].strip()
        output.start(name)
        yield from _arguments(cursor, output, name)
        yield from cursor.space()


def _spellings(name: str) -> tuple[str, str]:
    return f"<tool_call>{name}<arg_key>", f"<tool_call>{name}</tool_call>"


def _arguments(cursor: Cursor, output: Output, name: str) -> Steps[None]:
    writer = ObjectWriter(output)
    while (yield from cursor.literal("<arg_key>")):
        key = yield from cursor.within(_KEY_END, MAX_NAME_CHARS)
        yield from cursor.space()
        if key is None or not (yield from cursor.literal("<arg_value>")):
            give_up(cursor, output)
            return
        kinds = member_kinds(output.parameters(name), key[0].strip()) or ANY
        if not (yield from writer.member(cursor, key[0].strip(), kinds, _VALUE_END)):
            return
        yield from cursor.space()
    if (yield from cursor.literal("</tool_call>")):
        writer.close()
    else:
        give_up(cursor, output)


def why_not(traits: ModelTraits) -> str | None:
    """The template shows the tags."""
    return traits.missing("<arg_key>")


FORMAT = ToolFormat(
    names=("glm45_moe", "glm45", "glm47_moe"),
    make=grammar_format(grammar),
    why_not=why_not,
    rank=30,
    marks=CallMarks(
        "<tool_call>",
        lambda name: f"<tool_call>{name}",
        "</tool_call>",
        separator="\n",
        parameters=ParameterMarks(
            ("<arg_key>", ("</arg_key>\n<arg_value>", "</arg_key><arg_value>")),
            _VALUE_END.own,
            _VALUE_END.next_tags,
            unknown="any",
        ),
    ),
)

_SEARCH = ToolSpec("search.web-2", {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}}})

EXAMPLES = (
    Example("2 < 3 > 1", "2 < 3 > 1"),
    Example(
        'Ich suche.\n<tool_call>search.web-2\n<arg_key>q</arg_key>\n<arg_value>007 "ü"\n</arg_value>\n'
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Ich suche.",
        calls=(("search.web-2", {"q": '007 "ü"\n', "n": 3}),),
        tools=(_SEARCH,),
    ),
    Example(
        "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value><arg_key>b</arg_key><arg_value>two</arg_value>"
        "</tool_call><tool_call>g</tool_call>",
        calls=(("f", {"a": [1, 2], "b": "two"}), ("g", {})),
    ),
    Example(
        "<tool_call>search.web-2\n<arg_key>q</arg_key>\n<arg_value>Paris\n<arg_key>n</arg_key>\n<arg_value>3\n</tool_call>",
        calls=(("search.web-2", {"q": "Paris", "n": 3}),),
        tools=(_SEARCH,),
    ),
    Example("<tool_call>f\n</tool_call>", "<tool_call>f\n</tool_call>", tools=(_SEARCH,)),
    Example(
        "<tool_call>search.web-2\n<arg_key>q</arg_key>\n<arg_value>how to",
        calls=(("search.web-2", '{"q": "how to'),),
        tools=(_SEARCH,),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "A\n<tool_call>weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
