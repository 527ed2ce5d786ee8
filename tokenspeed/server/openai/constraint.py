"""From the fields that constrain an output to one grammar: OpenAI's `response_format`, the plain `regex`, `ebnf`,
`json_schema` and `structural_tag`, and vLLM's `guided_*` and `structured_outputs`. At most one of them in a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.patterns import check_pattern
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec

MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 1000
ANY_OBJECT = {"type": "object", "additionalProperties": True}

JsonSchema = dict[str, Any] | bool | str


class ConstraintFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request may say about the form of its output.

    Fields:
        response_format: OpenAI's text, json_object or json_schema, or a structural tag.
        regex, guided_regex: the whole output matches.
        ebnf, guided_grammar: a grammar in GBNF notation with the rule `root`.
        json_schema, guided_json: a JSON schema, or its text.
        structural_tag: a structural tag, or its text.
        guided_choice: the output is one of these strings.
        structured_outputs: one of json, regex, choice, grammar, json_object, structural_tag.
    """

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: JsonSchema | None = None
    structural_tag: dict[str, Any] | str | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


def constraint_of(fields: ConstraintFields, starts_after: tuple[int, ...] | None = None) -> GrammarSpec | None:
    """The request's grammar, checked as far as that is cheap, or None.

    Args:
        starts_after: token ids behind which the constraint starts (the end of the reasoning); None = at once.

    Raises:
        InvalidRequest: two constraints, a malformed one, or one that cannot be enforced; names the field.
    """
    asked = [(param, kind, value) for param, kind, value in _asked(fields) if value is not None]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _, _ in asked[:2])
        raise InvalidRequest(f"{names} both constrain the output; send one of them", param=asked[1][0])
    param, kind, value = asked[0]
    try:
        grammar, text = _MAKERS[kind](value, param)
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param, code="invalid_grammar") from None
    if len(text) > 2 * MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, the limit is {2 * MAX_GRAMMAR_CHARS}; make it smaller", param=param
        )
    return GrammarSpec(kind=grammar, text=text, starts_after=starts_after, param=param)


def _asked(fields: ConstraintFields) -> list[tuple[str, str, Any]]:
    """(field, how it is meant, value or None)."""
    return [
        *_response_format(fields.response_format),
        ("regex", "regex", fields.regex),
        ("ebnf", "grammar", fields.ebnf),
        ("json_schema", "json", fields.json_schema),
        ("structural_tag", "structural_tag", fields.structural_tag),
        ("guided_json", "json", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_grammar", "grammar", fields.guided_grammar),
        ("guided_choice", "choice", fields.guided_choice),
        *_structured_outputs(fields.structured_outputs),
    ]


def _response_format(value: dict[str, Any] | None) -> list[tuple[str, str, Any]]:
    name = "response_format"
    if value is None:
        return []
    match value.get("type"):
        case "text":
            return []
        case "json_object":
            return [(name, "json", ANY_OBJECT)]
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                raise InvalidRequest(
                    "response_format.json_schema must be an object with name and schema", param=f"{name}.json_schema"
                )
            return [(name, "json", inner["schema"])]
        case "structural_tag":
            return [(name, "structural_tag", value)]
    raise InvalidRequest(
        f"response_format.type is {value.get('type')!r}; it must be text, json_object, json_schema or structural_tag",
        param=f"{name}.type",
    )


def _structured_outputs(value: dict[str, Any] | None) -> list[tuple[str, str, Any]]:
    asked = []
    for key, item in (value or {}).items():
        if key not in (*_MAKERS, "json_object"):
            raise InvalidRequest(
                f"structured_outputs.{key} cannot be used; there are {', '.join(sorted(_MAKERS))} and json_object",
                param=f"structured_outputs.{key}",
            )
        if key == "json_object":
            key, item = "json", ANY_OBJECT if item else None
        asked.append((f"structured_outputs.{key}", key, item))
    return asked


def _json(value: Any, param: str) -> tuple[GrammarKind, str]:
    if isinstance(value, str):
        value = _parsed(value, param)
    if not isinstance(value, dict | bool):
        raise GrammarError(f"a JSON schema is an object, not {type(value).__name__}")
    return "json_schema", json.dumps(rewrite_schema(value, param))


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
    return "structural_tag", json.dumps(_checked_tag({"type": "structural_tag", **tag}, param))


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


def _checked_tag(node: Any, param: str) -> Any:
    """A structural tag whose schemas and patterns have passed the same checks as plain ones."""
    if isinstance(node, list):
        return [_checked_tag(item, param) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return {**node, "json_schema": rewrite_schema(node["json_schema"], param)}
    if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
        return {**node, "pattern": check_pattern(node["pattern"])}
    return {key: _checked_tag(item, param) for key, item in node.items()}


def _parsed(text: str, param: str) -> Any:
    if len(text) > MAX_GRAMMAR_CHARS * 2:
        raise GrammarError(f"the text has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS * 2}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is a string that is not JSON", param=param) from None


_META = frozenset("\\.^$*+?{}[]|()/-")
_MAKERS: Mapping[str, Any] = {
    "json": _json,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
