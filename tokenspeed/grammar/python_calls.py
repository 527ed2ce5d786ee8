"""A call as Python writes it, `f(a=1, b="x")`, as a part of a structural tag: keywords by the tool's schema. No torch.

A string is a JSON string or, where it is free or listed, one in single quotes; true, false and null are `True`, `False`
and `None` as well; everything else is JSON, which the format's parser reads the same. The first required keyword comes
first, all others follow in the schema's order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenspeed.grammar.branches import Branch, branches_of
from tokenspeed.grammar.forms import Form, either, json_form, listed, optional, regex_form, sequence, text_form
from tokenspeed.grammar.interface import GrammarError

MAX_OPTIONAL = 48
"""Parameters of a tool none of which is required: any of them may be the first, which the grammar writes out."""

_SEPARATOR = ", ?"
_SINGLE = regex_form(r"'(?:[^'\\\x00-\x1f]|\\[\\'\"ntrbf])*'")
_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_PYTHON = {True: "True", False: "False", None: "None"}


def python_call(name: str, schema: Mapping[str, Any] | None) -> Form:
    """A call of one function.

    Args:
        schema: of its arguments, as `json_schema` has rewritten it; None: any.

    Raises:
        GrammarError: Python's form of a call has no way to hold them to the schema.
    """
    arguments = _any_keywords() if schema is None else _keywords(schema)
    return sequence(text_form(f"{name}("), arguments, text_form(")"))


def _any_keywords() -> Form:
    return optional(listed(sequence(regex_form(f"{_NAME}="), _value({}, None)), _SEPARATOR))


def _keywords(schema: Mapping[str, Any]) -> Form:
    names = schema.get("properties", {})
    others = sorted(schema.keys() - {"type", "properties", "required", "additionalProperties", "$defs"})
    free = schema.get("additionalProperties")
    if others or (free and not (free == {} and names)):
        if not others and not names and free == {}:
            return _any_keywords()
        key = others[0] if others else "additionalProperties"
        raise GrammarError(f"#/{key} cannot be held; in this model's format of calls only a list of properties can be")
    odd = [name for name in names if not (name.isascii() and name.isidentifier())]
    if odd:
        raise GrammarError(f"the name {odd[0]!r} cannot be a keyword of a Python call, which this model's calls are")
    required, definitions = schema.get("required", ()), schema.get("$defs")
    whole = {name: sequence(text_form(f"{name}="), _value(member, definitions)) for name, member in names.items()}
    first = next((name for name in names if name in required), None)
    if first is not None:
        return sequence(
            whole[first], *(_behind(form, name in required) for name, form in whole.items() if name != first)
        )
    if len(names) > MAX_OPTIONAL:
        raise GrammarError(
            f"{len(names)} properties of which none is required, the limit is {MAX_OPTIONAL}; require one of them"
        )
    forms = list(whole.values())
    if not forms:
        return text_form("")
    starts = [
        sequence(form, *(_behind(later, False) for later in forms[place + 1 :])) for place, form in enumerate(forms)
    ]
    return optional(either(starts))


def _behind(form: Form, is_required: bool) -> Form:
    whole = sequence(regex_form(_SEPARATOR), form)
    return whole if is_required else optional(whole)


def _value(member: Mapping[str, Any], definitions: Mapping[str, Any] | None) -> Form:
    return either([form for branch in branches_of(member, definitions) for form in _spellings(branch)])


def _spellings(branch: Branch) -> list[Form]:
    forms = [json_form(branch.schema)]
    if branch.kind in ("boolean", "null"):
        values = branch.values or ([True, False] if branch.kind == "boolean" else [None])
        forms += [text_form(_PYTHON[value]) for value in values]
    elif branch.kind == "string" and branch.values is not None:
        forms += [text_form(f"'{value}'") for value in branch.values if _is_plain(value)]
    elif branch.kind == "string" and branch.is_free:
        forms.append(_SINGLE)
    return forms


def _is_plain(value: str) -> bool:
    return json.dumps(value, ensure_ascii=False) == f'"{value}"' and "'" not in value
