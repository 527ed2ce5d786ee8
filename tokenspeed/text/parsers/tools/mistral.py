"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": ...}]`, and from tokenizer v11 on, once a call,
`[TOOL_CALLS]name[ARGS]{...}` with an optional `[CALL_ID]id` before `[ARGS]`.

Source: mistral-common, and the chat templates on the model cards. Ids: the model's own where it writes one, else nine
alphanumeric characters, since those templates refuse a history whose ids have another form.
"""

from __future__ import annotations

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Example, ModelTraits, ParseContext, ToolFormat, ToolSpec
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, call_list, cut_call, marked_arguments, may_begin_arguments
from tokenspeed.text.parsers.machine import grammar_format
from tokenspeed.text.parsers.output import Output

_CALLS = Markers("[TOOL_CALLS]")
_BEHIND_NAME = Markers("[CALL_ID]", "[ARGS]", "{")
_ARGS = Markers("[ARGS]")


def _nine(context: ParseContext, name: str, index: int) -> str:
    return context.hex_digits(9)


def grammar(cursor: Cursor, output: Output) -> Steps[None]:
    """Calls behind each mark."""
    while (mark := (yield from cursor.until(_CALLS, output.content))) is not None:
        cursor.record(mark)
        yield from cursor.space()
        if (yield from cursor.peek()) == "[":
            yield from call_list(cursor, output, needs_arguments=False)
        else:
            yield from _named_call(cursor, output)


def _named_call(cursor: Cursor, output: Output) -> Steps[None]:
    header = yield from cursor.within(_BEHIND_NAME, MAX_NAME_CHARS, leave=True)
    name = "" if header is None else header[0].strip()
    own_id: str | None = None
    if (yield from cursor.literal("[CALL_ID]")):
        identity = yield from cursor.within(_ARGS, MAX_NAME_CHARS)
        own_id = "" if identity is None else identity[0].strip()
    else:
        yield from cursor.literal("[ARGS]")
    is_call = bool(name) and own_id != "" and output.accepts(name)
    if not is_call or not (yield from may_begin_arguments(cursor, markup="")):
        # An id that was cut is not looked at: the name in front of it is one that may be called.
        begun = cursor.begun() if own_id == "" and output.accepts(name) else ""
        if not cut_call(cursor, output, lambda name: (*_spellings(name), begun)):
            output.content(cursor.recorded())
        return
    cursor.recorded()
    output.start(name, own_id)
    yield from marked_arguments(cursor, output, end=None)
    yield from cursor.space()


def _spellings(name: str) -> tuple[str, str]:
    return f"[TOOL_CALLS]{name}[ARGS]", f"[TOOL_CALLS]{name}[CALL_ID]"


def why_not(traits: ModelTraits) -> str | None:
    """The template writes the mark."""
    return traits.missing("[TOOL_CALLS]")


FORMAT = ToolFormat(
    names=("mistral",),
    make=grammar_format(grammar, ids=_nine, keeps_ids=True),
    why_not=why_not,
    rank=30,
    needs_special_tokens=True,
    ids=_nine,
    marks=CallMarks(
        "[TOOL_CALLS]",
        lambda name: f"[TOOL_CALLS]{name}",
        "",
        own_id=("[CALL_ID]", "[A-Za-z0-9]{9}"),
        before_arguments="[ARGS]",
        list_key="arguments",
    ),
)

EXAMPLES = (
    Example("Just [text]", "Just [text]"),
    Example(
        '[TOOL_CALLS] [{"name": "f-1.x", "arguments": {"a": "[TOOL_CALLS] ]"}}, {"name": "g", "arguments": {}}]',
        calls=(("f-1.x", {"a": "[TOOL_CALLS] ]"}), ("g", {})),
    ),
    Example(
        'Sure. [TOOL_CALLS]f[ARGS]{"city": "Zürich"}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{"x": {"y": []}}',
        "Sure.",
        calls=(("f", {"city": "Zürich"}), ("g", {"x": {"y": []}})),
    ),
    Example("[TOOL_CALLS] f  [ARGS]\n x", "[TOOL_CALLS] f  [ARGS]\n x", tools=(ToolSpec("g"),)),
    Example('[TOOL_CALLS]f{"a": 1}', calls=(("f", {"a": 1}),)),
    Example('[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]f[ARGS]{"a": 1}', tools=(ToolSpec("g"),)),
    Example(
        '[TOOL_CALLS]f[ARGS]{"a": "b", "c',
        calls=(("f", '{"a": "b", "c'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        "A [TOOL_CALLS]weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
        incomplete=True,
    ),
)
