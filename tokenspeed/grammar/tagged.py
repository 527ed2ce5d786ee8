"""Arguments that are written parameter by parameter, in tags, as a part of a structural tag. No torch.

Parameters come in the schema's order, those that are required all. A string is raw text up to its closing tag
(`raw_text`), anything else JSON by its schema. Some formats say a value's type in its tag; elsewhere the parser goes
by the tool's schema, so that a text may not be readable as a type that the schema bounds otherwise. Arguments that
are more than a list of parameters stand as one JSON object where the format has that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.grammar.branches import Branch, branches_of
from tokenspeed.grammar.forms import (
    Form,
    any_text,
    either,
    json_form,
    optional,
    regex_form,
    repeated,
    sequence,
    text_form,
)
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.raw_text import exact_string, holds_none, json_inside, raw_string
from tokenspeed.text.parsers.interface import ParameterMarks
from tokenspeed.text.parsers.typed_arguments import ANY, STRING, Kind, Kinds, json_text, member_kinds

SPACES = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space as Python has it, for a class."""

_PLAIN = {"type", "properties", "required", "additionalProperties", "$defs"}
_KEY = re.compile(r"[^<>\s\"&]+")
_ANY_KEY = r'[^<>\s"&]{1,64}'
_NEWLINE = optional(text_form("\n"))
_BEGINS: Mapping[str, str] = {
    "null": "nN",
    "boolean": "tTfF",
    "integer": "0-9\\-",
    "number": "0-9\\-",
    "array": "\\[(",
    "object": "{",
}
"""What a text begins with that a parser reads as a type where it could be a string, for a class."""


def tagged_arguments(
    schema: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None, marks: ParameterMarks
) -> Form:
    """The parameters of one call.

    Args:
        schema: as `json_schema` has rewritten it; None: anything.
        parameters: as the request has it, which is what the parser goes by.

    Raises:
        GrammarError: the format has no way to hold them to the schema; names the keyword or the parameter.
    """
    if schema is None:
        return _free(marks)
    reason = _why_no_list(schema)
    if reason is not None:
        if marks.whole is not None:
            return _whole(schema, marks)
        if schema.keys() <= {"type", "additionalProperties"} and schema.get("additionalProperties") == {}:
            return _free(marks)  # any arguments
        raise GrammarError(f"{reason}; in this model's format of calls only a list of properties can be held")
    required, definitions = schema.get("required", ()), schema.get("$defs")
    parts = [_NEWLINE]
    for key, member in schema.get("properties", {}).items():
        branches = branches_of(member, definitions)
        try:
            if marks.by_type is not None:
                tail = _typed_value(branches, marks)
            else:
                named = member_kinds(parameters, key) or (ANY if marks.unknown == "any" else STRING)
                tail = sequence(_between(marks.begin[1]), _value(branches, named, marks))
        except GrammarError as error:
            raise GrammarError(f"#/properties/{key}: {error}") from None
        whole = sequence(text_form(marks.begin[0] + key), tail, _NEWLINE)
        parts.append(whole if key in required else optional(whole))
    return sequence(*parts)


def _why_no_list(schema: Mapping[str, Any]) -> str | None:
    """Why arguments are more than a list of properties with names that a tag can hold."""
    names = schema.get("properties", {})
    others = sorted(schema.keys() - _PLAIN)
    if others:
        return f"#/{others[0]} cannot be held"
    # Where there are names, no others are made up.
    if schema.get("additionalProperties") and not (names and schema["additionalProperties"] == {}):
        return "#/additionalProperties cannot be held"
    odd = [name for name in names if not _KEY.fullmatch(name)]
    return f"the name {odd[0]!r} cannot be written" if odd else None


def _whole(schema: Mapping[str, Any], marks: ParameterMarks) -> Form:
    assert marks.whole is not None
    before, behind = marks.whole
    return sequence(_NEWLINE, *_texts(before), json_form(schema), *_texts(behind), _NEWLINE)


def _free(marks: ParameterMarks) -> Form:
    """Any parameters."""
    behind = marks.begin[1]
    if marks.by_type is not None:
        behind = tuple(dict.fromkeys(text for texts in marks.by_type.values() for text in texts))
    begin = sequence(text_form(marks.begin[0]), regex_form(_ANY_KEY), _between(behind))
    return sequence(_NEWLINE, repeated(sequence(begin, any_text(*marks.stops), text_form(marks.end), _NEWLINE)))


def _between(texts: tuple[str, ...]) -> Form:
    return either([text_form(text) for text in texts])


def _texts(text: str) -> list[Form]:
    return [text_form(text)] if text else []


def _typed_value(branches: list[Branch], marks: ParameterMarks) -> Form:
    """A value and the text in front of it that says its type."""
    assert marks.by_type is not None
    forms, reason = [], GrammarError("no value fits")
    for branch in branches:
        try:
            value = _strings(branch, marks) if branch.kind == "string" else _json(branch, marks)
        except GrammarError as error:
            reason = error
            continue
        forms.append(sequence(_between(marks.by_type[branch.kind]), value))
    if not forms:
        raise reason
    return either(forms)


def _value(branches: list[Branch], kinds: Kinds, marks: ParameterMarks) -> Form:
    """A value of which the parser thinks that it may be of `kinds`.

    Raises:
        GrammarError: no text would be read as a value by the schema.
    """
    forms: list[Form] = []
    strings = [branch for branch in branches if branch.kind == "string"] if "string" in kinds else []
    others = [branch for branch in branches if branch.kind in kinds or (branch.kind == "integer" and "number" in kinds)]
    free = {branch.kind for branch in branches if branch.is_free}
    bounded = sorted(kinds - free - {"string"} - ({"integer"} if "number" in free else set()))
    for branch in strings:
        if branch.values is not None:
            exact = [text for text in branch.values if json.loads(json_text(text, kinds)) == text]
            if exact:
                forms.append(_strings(Branch("string", branch.schema, exact), marks))
        elif not bounded:
            forms.append(_strings(branch, marks))
        elif branch.is_free:
            forms.append(_guarded(bounded, marks))
        else:
            raise GrammarError(
                f"a bounded string that may also be {' or '.join(bounded)} cannot be told apart; give it one type"
            )
    forms += [_json(branch, marks) for branch in others if branch.kind != "string"]
    if not forms:
        raise GrammarError("its type is not certain; say `type`")
    return either(forms)


def _strings(branch: Branch, marks: ParameterMarks) -> Form:
    if branch.values is None:
        return raw_string(branch.schema, marks.stops, marks.line)
    texts = [text for text in branch.values if text and holds_none(text, marks.stops)]
    if not texts:
        raise GrammarError(f"no string of its enum can stand in front of {marks.end!r}")
    return exact_string(either([text_form(text) for text in texts]), marks.end, marks.line)


def _guarded(bounded: Sequence[Kind], marks: ParameterMarks) -> Form:
    """Any string that cannot be read as one of these types."""
    first = regex_form(f"[^{SPACES}{''.join(_BEGINS[kind] for kind in bounded)}{marks.end[0]}]")
    return exact_string(optional(sequence(first, any_text(*marks.stops))), marks.end, marks.line)


def _json(branch: Branch, marks: ParameterMarks) -> Form:
    form = json_form(json_inside(branch.schema, marks.stops))
    form["excludes"] = list(marks.stops)  # a tag in a string would end the value there
    return exact_string(form, marks.end, marks.line)
