"""Calls in formats in which only an output's beginning tells them from an answer (`OpeningMarks`). No torch.

An output is nothing but calls, of tools on offer, or it is text that the format's parser cannot take for calls. Where a
tag makes calls, too, text may stand in front of it; behind calls there is nothing. The price of certainty in text:

- Text that begins with `{` (or `[`, where calls may stand in an array) holds neither "arguments" nor "parameters" in
  quotes, nor an escape that could spell them.
- Text that begins with `[` and a name has no `(` behind the name, where calls are Python.
- Text that begins with `<` goes on with another character than `|`, where there is a tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed.grammar.forms import (
    Form,
    any_text,
    either,
    json_form,
    listed,
    optional,
    regex_form,
    sequence,
    text_form,
)
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.python_calls import python_call
from tokenspeed.grammar.tagged import SPACES
from tokenspeed.text.parsers.interface import OpeningMarks

Schemas = Callable[[dict[str, Any], str], Mapping[str, Any] | None]
"""(function, root) -> the rewritten schema of its arguments (see `json_schema.rewrite_schema`); None: any object."""

_SPACE = regex_form(f"[{SPACES}]*")
_GAP = regex_form(f"[{SPACES}]{{0,4}}")  # bounded, as small models otherwise write blanks until max_tokens
_NEXT_OBJECT = "[ \\n]{0,2};?[ \\n]{0,2}"
_NEXT_CALL = " ?, ?"


def calls_or_text(functions: Sequence[dict[str, Any]], marks: OpeningMarks, schemas: Schemas) -> Form:
    """An output from its first character on.

    Args:
        functions: the tools on offer.

    Raises:
        InvalidRequest: what `schemas` raises.
        GrammarError: parameters that cannot be held in this format; names tool and reason.
    """
    if marks.style == "object":
        calls, text = _objects(functions, marks, schemas), _text_or_object(marks)
    else:
        each = [_python_call(function, schemas(function, "#")) for function in functions]
        calls = sequence(text_form("["), _GAP, listed(either(each), _NEXT_CALL), _GAP, text_form("]"))
        text = _text_or_list()
    if marks.around is not None:
        begin, end = (optional(text_form(text)) for text in marks.around)
        calls = sequence(begin, _GAP, calls, _GAP, end)
    in_front = _SPACE
    if marks.tag is not None:
        tagged = sequence(optional(sequence(_first(marks), any_text(marks.tag))), text_form(marks.tag), _GAP)
        in_front = sequence(_SPACE, optional(tagged))
    return either([sequence(in_front, calls), sequence(_SPACE, optional(text))])


def _python_call(function: dict[str, Any], schema: Mapping[str, Any] | None) -> Form:
    try:
        return python_call(function["name"], schema)
    except GrammarError as error:
        raise GrammarError(f"the parameters of the tool {function['name']!r}: {error}") from None


def _objects(functions: Sequence[dict[str, Any]], marks: OpeningMarks, schemas: Schemas) -> Form:
    """One object or several, or an array of them."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for place, function in enumerate(functions):
        root = f"#/$defs/tool{place}"
        schema = schemas(function, root)
        definitions[f"tool{place}"] = {"type": "object", "additionalProperties": {}} if schema is None else schema
        calls += [
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["function"]},
                    "name": {"enum": [function["name"]]},
                    key: {"$ref": root},
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for key in ("parameters", "arguments")
        ]
    several = listed(json_form({"anyOf": calls, "$defs": definitions}), _NEXT_OBJECT)
    if not marks.arrays:
        return several
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return either([several, json_form(array)])


def _first(marks: OpeningMarks) -> Form:
    """The first characters of text that is no call, white space apart."""
    taken = "{\\[" if marks.arrays else "{"
    mark = "" if marks.tag is None else marks.tag[:2]
    return _beginning(taken, mark)


def _beginning(taken: str, mark: str) -> Form:
    """A first character that is none of `taken`; one that a mark of two begins with, with what follows it."""
    if not mark:
        return regex_form(f"[^{taken}{SPACES}]")
    one = mark[0]
    return regex_form(f"{one}+[^{one}\\{mark[1]}]|[^{one}{taken}{SPACES}]")


def _text_or_object(marks: OpeningMarks) -> Form:
    tags = [] if marks.tag is None else [marks.tag]
    plain = sequence(_first(marks), any_text(*tags))
    bracket = regex_form("[{\\[]" if marks.arrays else "[{]")
    no_call = sequence(bracket, any_text('"arguments"', '"parameters"', "\\u", *tags))
    return either([plain, no_call])


def _text_or_list() -> Form:
    """What `pythonic` does not take for calls: a list whose first item is no name with a bracket behind."""
    name = "[A-Za-z0-9_.\\-]"
    item = regex_form(f"[{SPACES}]*(?:{name}+[^A-Za-z0-9_.\\-(]|[^A-Za-z0-9_.\\-{SPACES}])")
    cut = regex_form(f"[{SPACES}]*{name}*")
    bracket = sequence(text_form("["), either([sequence(item, any_text()), cut]))
    return either([sequence(_beginning("\\[", "<|"), any_text()), bracket])
