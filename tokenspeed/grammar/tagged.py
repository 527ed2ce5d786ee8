"""Arguments that are written parameter by parameter, in tags (qwen_coder, glm45), as a part of a structural tag.

A value that can only be a string is text up to its closing tag, or one of the strings its `enum` names; one that cannot
be a string is JSON by its schema. What may be either is any text, and so are strings with a pattern, a format or a
length: the tag around would not be kept out of them. Parameters come in the schema's order, those that are required
all. Parameters of a schema that is more than a list of properties are free. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.grammar.forms import Form, either, json_form, optional, repeated, sequence, text_form
from tokenspeed.text.parsers.interface import ParameterMarks
from tokenspeed.text.parsers.typed_arguments import STRING, Kinds, member_kinds

_PLAIN = {"type", "properties", "required", "additionalProperties", "$defs"}
_KEY = re.compile(r"[^<>\s\"]+")
_ANY_KEY = r'[^<>\s"]{1,64}'
_LENGTHS = re.compile('"(?:min|max)Length"')  # the library drops them beside `excludes`
_NEWLINE = optional(text_form("\n"))


def tagged_arguments(
    schema: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None, marks: ParameterMarks
) -> Form:
    """The parameters of one call.

    Args:
        schema: as `json_schema` has rewritten it; None: anything.
        parameters: as the request has it, which is what the parser goes by.
    """
    if schema is None or not _is_plain(schema):
        key = {"type": "regex", "pattern": _ANY_KEY}
        return sequence(
            _NEWLINE, repeated(sequence(_begin(marks, key), _any_text(marks), text_form(marks.end), _NEWLINE))
        )
    required, definitions = schema.get("required", ()), schema.get("$defs")
    parts = [_NEWLINE]
    for key, member in schema.get("properties", {}).items():
        value = _value(member, definitions, member_kinds(parameters, key), marks)
        whole = sequence(_begin(marks, text_form(key)), value, text_form(marks.end), _NEWLINE)
        parts.append(whole if key in required else optional(whole))
    return sequence(*parts)


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """A list of properties, all with names that a tag can hold."""
    names = schema.get("properties", {})
    return not (schema.keys() - _PLAIN or schema.get("additionalProperties")) and all(map(_KEY.fullmatch, names))


def _begin(marks: ParameterMarks, key: Form) -> Form:
    """Up to the value."""
    before, behind = marks.begin
    return sequence(text_form(before), key, either([text_form(text) for text in behind]))


def _value(member: Mapping[str, Any], definitions: Any, kinds: Kinds, marks: ParameterMarks) -> Form:
    """A value.

    Args:
        member: its rewritten schema.
        definitions: `$defs` of the schema around.
        kinds: what the parser takes it for; empty = it does not know.
    """
    line = text_form("\n")
    if kinds == STRING:
        texts = member.get("enum", [member["const"]] if "const" in member else None)
        if texts is None or not all(isinstance(text, str) and text and marks.end not in text for text in texts):
            return _any_text(marks)
        exact = either([text_form(text) for text in texts])
        return sequence(line, exact, line) if marks.line else exact
    if not kinds or "string" in kinds:
        return _any_text(marks)
    schema = {**member, "$defs": definitions} if "$ref" in json.dumps(member) else member
    form = json_form(schema)
    if not _LENGTHS.search(json.dumps(schema)):
        form["excludes"] = [marks.end]  # the closing tag in a string would end the value there
    return sequence(line, form, line) if marks.line else form


def _any_text(marks: ParameterMarks) -> Form:
    return {"type": "any_text", "excludes": [marks.end]}
