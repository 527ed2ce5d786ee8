"""From what a user wrote to a `GrammarSpec`, checked as far as that is cheap. Knows no request and no wire format.

Anything else by which a user can say what an output has to obey gets its maker here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.patterns import check_pattern
from tokenspeed.grammar.structural_tag import MAX_GRAMMAR_CHARS, checked_tag
from tokenspeed.protocol.echo import cut, json_type
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec

MAX_CHOICES = 1000
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "additionalProperties": True}

_META = frozenset("\\.^$*+?{}[]|()/-")


def make_spec(kind: str, value: Any, param: str, starts_after: tuple[int, ...] | None = None) -> GrammarSpec:
    """A user's constraint as the engine takes it.

    Args:
        kind: one of `KINDS`.
        value: json: a JSON schema or its text. regex: text that the whole output matches. choice: a list of strings.
            grammar: GBNF with the rule `root`. structural_tag: an object or its text.
        param: what the user calls it, for errors.
        starts_after: see `GrammarSpec`.

    Raises:
        InvalidRequest: it is malformed or cannot be enforced; names the place and the limit.
    """
    try:
        grammar, text = _MAKERS[kind](value, param)
        text.encode()  # it leaves this process as UTF-8
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param, code="invalid_grammar") from None
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply; flatten it", param=param, code="invalid_grammar") from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds half a character", param=param, code="invalid_grammar") from None
    if len(text) > 2 * MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, the limit is {2 * MAX_GRAMMAR_CHARS}; make it smaller", param=param
        )
    return GrammarSpec(kind=grammar, text=text, starts_after=starts_after, param=param)


def one_of(outputs: Mapping[str, Any], name: str) -> list[tuple[str, str, Any]]:
    """The entries of `{"json": ...}`, `{"choice": [...]}` and so on, each as (param, kind, value); a value of None
    says nothing.

    Args:
        name: what the user calls the mapping.

    Raises:
        InvalidRequest: there is no such kind.
    """
    asked = []
    for key, value in outputs.items():
        if key not in (*KINDS, "json_object"):
            raise InvalidRequest(
                f"{name}.{cut(key)} cannot be used; there are {', '.join(KINDS)} and json_object", param=f"{name}.{key}"
            )
        kind = key
        if key == "json_object":
            kind, value = "json", ANY_OBJECT if value else None
        asked.append((f"{name}.{key}", kind, value))
    return asked


def pick(asked: list[tuple[str, str, Any]], starts_after: tuple[int, ...] | None = None) -> GrammarSpec | None:
    """The one constraint among (param, kind, value), or None where every value is None.

    Raises:
        InvalidRequest: there are two, or see `make_spec`.
    """
    said = [each for each in asked if each[2] is not None]
    if not said:
        return None
    if len(said) > 1:
        names = " and ".join(param for param, _, _ in said[:2])
        raise InvalidRequest(f"{names} both constrain the output; send one of them", param=said[1][0])
    param, kind, value = said[0]
    return make_spec(kind, value, param, starts_after)


def _json(value: Any, param: str) -> tuple[GrammarKind, str]:
    if isinstance(value, str):
        value = _parsed(value, param)
    if not isinstance(value, dict | bool):
        raise GrammarError(f"a JSON schema is an object, not {json_type(value)}")
    try:
        return "json_schema", json.dumps(rewrite_schema(value, param), allow_nan=False)
    except ValueError:
        raise GrammarError("a JSON schema holds no NaN and no infinity") from None


def _regex(value: Any, _param: str) -> tuple[GrammarKind, str]:
    if not isinstance(value, str):
        raise GrammarError("a regular expression is a string")
    return "regex", check_pattern(value)


def _grammar(value: Any, _param: str) -> tuple[GrammarKind, str]:
    if not isinstance(value, str) or not value.strip():
        raise GrammarError("a grammar is a string that is not empty")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"the grammar has {len(value)} characters, the limit is {MAX_GRAMMAR_CHARS}")
    return "ebnf", value


def _choice(value: Any, _param: str) -> tuple[GrammarKind, str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise GrammarError("choices are a list of strings, none of them empty")
    if len(value) > MAX_CHOICES:
        raise GrammarError(f"there are {len(value)} choices, the limit is {MAX_CHOICES}")
    return "regex", "|".join("".join(f"\\{c}" if c in _META else c for c in item) for item in value)


def _structural_tag(value: Any, param: str) -> tuple[GrammarKind, str]:
    tag = _parsed(value, param) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise GrammarError("a structural tag is an object")
    if "format" not in tag and "structures" in tag:
        tag = _old_tag(tag)
    return "structural_tag", json.dumps(checked_tag(tag, param))


def _old_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """The form with `structures` and `triggers`, in today's words."""
    try:
        tags = [
            {
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item["schema"]},
                "end": item["end"],
            }
            for item in tag["structures"]
        ]
        return {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    except (KeyError, TypeError):
        raise GrammarError("structures are objects with begin, schema and end, beside triggers") from None


def _parsed(text: str, param: str) -> Any:
    if len(text) > MAX_GRAMMAR_CHARS * 2:
        raise GrammarError(f"the text has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS * 2}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is a string that is not JSON", param=param) from None


_MAKERS: Mapping[str, Callable[[Any, str], tuple[GrammarKind, str]]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
KINDS = tuple(_MAKERS)
"""The ways to say it, by the names that vLLM's `structured_outputs` has for them."""
