"""From the fields that constrain an output to one grammar: OpenAI's `response_format`, the plain `regex`, `ebnf`,
`json_schema` and `structural_tag`, and vLLM's `guided_*` and `structured_outputs`. At most one of them in a request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed.grammar.spec import ANY_OBJECT, one_of, pick
from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.server.body import to_struct
from tokenspeed.server.rendering import num_chars

JsonSchema = dict[str, Any] | bool | str


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema. Its name is asked for as in OpenAI's API and, like `description` and `strict`, changes nothing: an
    answer always obeys the schema."""

    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that obeys a schema."""

    json_schema: NamedSchema


class _ResponseFormat(msgspec.Struct):
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat


class ConstraintFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request may say about the form of its output.

    Fields:
        response_format: OpenAI's `TextFormat`, `JsonObjectFormat` or `JsonSchemaFormat`, or a structural tag.
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
    return pick(_asked(fields), starts_after)


def constraint_chars(fields: ConstraintFields) -> int:
    """How long it is, about."""
    said = (getattr(fields, name) for name in ConstraintFields.__struct_fields__)
    return sum(num_chars(value) for value in said if value is not None)


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
        *one_of(fields.structured_outputs or {}, "structured_outputs"),
    ]


def _response_format(value: dict[str, Any] | None) -> list[tuple[str, str, Any]]:
    name = "response_format"
    if value is None:
        return []
    kind = value.get("type")
    if kind == "structural_tag":
        return [(name, "structural_tag", value)]
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            f"response_format.type is {echo(kind)}; it must be text, json_object, json_schema or structural_tag",
            param=f"{name}.type",
        )
    match to_struct({name: value}, _ResponseFormat).response_format:
        case TextFormat():
            return []
        case JsonObjectFormat():
            return [(name, "json", ANY_OBJECT)]
        case JsonSchemaFormat(json_schema=named):
            return [(name, "json", named.schema)]
