"""Schemas as pydantic 2 writes them, of each kind of field: taken, and what is generated is valid; or a 400 that names
the keyword and stands in the page's table. The same as parameters of a strict tool. Written out: other versions of
pydantic, and other libraries, write the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_support import EOS, allowed, byte_backend, compiled, takes

from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.grammar.tools import tool_choice_schema
from tokenspeed.protocol.errors import InvalidRequest

PAGE = Path(__file__).parents[2] / "docs/serving/structured-output.md"
INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
COLOR = {"enum": ["red", "blue"], "title": "Color", "type": "string"}


def model(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"properties": properties, "required": list(required), "title": "M", "type": "object"}


def pets(**default: Any) -> dict[str, Any]:
    cat = {"kind": {"const": "cat", "title": "Kind", "type": "string", **default}, "lives": {**INT, "default": 9}}
    dog = {"kind": {"const": "dog", "title": "Kind", "type": "string", **default}, "name": STR}
    required = () if default else ("kind",)
    mapping = {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}
    return {
        "$defs": {"Cat": model(required, **cat), "Dog": model((*required, "name"), **dog)},
        "discriminator": {"mapping": mapping, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    }


# name -> (schema, values it must be able to generate)
TAKEN: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "HttpUrl": ({"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"}, ("https://a.example/b%20c",)),
    "AnyUrl": ({"format": "uri", "minLength": 1, "type": "string"}, ("ftp://a/b",)),
    "PostgresDsn": ({"format": "multi-host-uri", "minLength": 1, "type": "string"}, ("postgres://a,b/c",)),
    "EmailStr": ({"format": "email", "type": "string"}, ("ada@example.com",)),
    "EmailStr, bounded": ({"format": "email", "maxLength": 254, "minLength": 3, "type": "string"}, ("ada@a.example",)),
    "NameEmail": ({"format": "name-email", "type": "string"}, ("Ada <ada@example.com>",)),
    "UUID": ({"format": "uuid", "type": "string"}, ("123e4567-e89b-12d3-a456-426614174000",)),
    "UUID4": ({"format": "uuid4", "type": "string"}, ("123e4567-e89b-42d3-a456-426614174000",)),
    "datetime": ({"format": "date-time", "type": "string"}, ("2020-02-01T10:20:30Z",)),
    "date": ({"format": "date", "type": "string"}, ("2020-02-29",)),
    "time": ({"format": "time", "type": "string"}, ("10:20:30Z",)),
    "timedelta": ({"format": "duration", "type": "string"}, ("P1DT2H",)),
    "Decimal": ({"anyOf": [{"type": "number"}, STR]}, (1.5, "1.5")),
    "Decimal, pattern": ({"anyOf": [{"type": "number"}, {**STR, "pattern": DECIMAL + r"\d*\.?\d*$"}]}, (1.5, "-1.5")),
    "Decimal, digits": ({"anyOf": [{"exclusiveMinimum": 0, "type": "number"}, {**STR, "pattern": DECIMAL
        + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"}]}, (1.5, "123.45")),
    "conint": ({"maximum": 10, "minimum": 1, "type": "integer"}, (1, 10)),
    "conint, exclusive": ({"exclusiveMaximum": 10, "exclusiveMinimum": 1, "type": "integer"}, (2, 9)),
    "confloat": ({"exclusiveMaximum": 2, "minimum": 0.5, "type": "number"}, (0.5, 1.9)),
    "conlist": ({"items": INT, "maxItems": 3, "minItems": 1, "type": "array"}, ([1], [1, 2, 3])),
    "set of a Literal": ({"items": {"enum": ["a", "b"], "type": "string"}, "type": "array", "uniqueItems": True},
        ([], ["a"], ["a", "b"])),
    "set of an Enum": ({"$defs": {"Color": COLOR}, "items": {"$ref": "#/$defs/Color"}, "type": "array",
        "uniqueItems": True}, ([], ["red", "blue"])),
    "dict": ({"additionalProperties": INT, "type": "object"}, ({}, {"a": 1})),
    "dict of any": ({"additionalProperties": True, "type": "object"}, ({}, {"a": [1]})),
    "dict of a pattern": ({"patternProperties": {"^[a-z]+$": INT}, "type": "object"}, ({"ab": 1},)),
    "dict, bounded": ({"additionalProperties": INT, "maxProperties": 3, "minProperties": 1, "type": "object"},
        ({"a": 1},)),
    "dict of an Enum": ({"$defs": {"Color": COLOR}, "additionalProperties": INT, "propertyNames":
        {"$ref": "#/$defs/Color"}, "type": "object"}, ({"red": 1},)),
    "Literal": ({"enum": ["a", "b"], "type": "string"}, ("a", "b")),
    "Literal, mixed": ({"enum": ["a", 1, None, True]}, ("a", 1, None, True)),
    "Enum": (COLOR, ("red",)),
    "IntEnum": ({"enum": [1, 2], "title": "Num", "type": "integer"}, (1, 2)),
    "Optional": ({"anyOf": [INT, NULL]}, (1, None)),
    "Optional Enum": ({"$defs": {"C": COLOR}, "anyOf": [{"$ref": "#/$defs/C"}, NULL], "default": None}, ("red", None)),
    "Union": ({"anyOf": [INT, STR, {"items": INT, "type": "array"}]}, (1, "a", [1])),
    "discriminated": (pets(), ({"kind": "cat"}, {"kind": "dog", "name": "x"})),
    "discriminated, default": (pets(default="cat"), ({"kind": "cat", "lives": 1}, {"kind": "dog", "name": "x"})),
    "recursive": ({"$defs": {"Node": model(("value",), value=INT, children={"default": [], "items":
        {"$ref": "#/$defs/Node"}, "type": "array"})}, "$ref": "#/$defs/Node"}, ({"value": 1, "children": []},)),
    "tree": ({"$defs": {"T": model(left={"anyOf": [{"$ref": "#/$defs/T"}, NULL], "default": None})},
        "$ref": "#/$defs/T"}, ({}, {"left": None}, {"left": {}})),
    "tuple": ({"maxItems": 2, "minItems": 2, "prefixItems": [INT, STR], "type": "array"}, ([1, "a"],)),
    "tuple of any length": ({"items": INT, "type": "array"}, ([], [1])),
    "empty tuple": ({"maxItems": 0, "minItems": 0, "type": "array"}, ([],)),
    "IPv4Address": ({"format": "ipv4", "type": "string"}, ("1.2.3.4",)),
    "IPv6Address": ({"format": "ipv6", "type": "string"}, ("::1",)),
    "IPvAnyAddress": ({"format": "ipvanyaddress", "type": "string"}, ("::1",)),
    "SecretStr": ({"format": "password", "type": "string", "writeOnly": True}, ("x",)),
    "Path": ({"format": "path", "type": "string"}, ("/tmp/x",)),
    "bytes": ({"format": "binary", "type": "string"}, ("x",)),
    "Base64Bytes": ({"format": "base64", "type": "string"}, ("eA==",)),
    "Json": ({"contentMediaType": "application/json", "contentSchema": INT, "type": "string"}, ("1",)),
    "ByteSize": ({"anyOf": [{"pattern": "^\\s*(\\d*\\.?\\d+)\\s*(\\w+)?", "type": "string"},
        {"minimum": 0, "type": "integer"}]}, (1, "1 MB")),
    "constr": ({"maxLength": 5, "minLength": 1, "type": "string"}, ("abcde",)),
    "constr, pattern": ({"pattern": "^[A-Z]{2}-\\d+$", "type": "string"}, ("AB-12",)),
    "constr, pattern and length": ({"maxLength": 5, "pattern": "^[a-z]+$", "type": "string"}, ("abcde",)),
    "Any": ({}, (1, {"a": None})),
    "extra forbid, examples": ({**model(("a",), a={**INT, "default": 1, "title": "A", "description": "d", "examples":
        [1], "deprecated": True}, b={"anyOf": [STR, NULL], "default": None, "x-foo": 1}), "additionalProperties": False,
        "examples": [{"a": 1}]}, ({"a": 1, "b": None},)),
    "nested, description": ({"$defs": {"Addr": model(("street",), street=STR)}, **model(("d",), d=
        {"$ref": "#/$defs/Addr", "description": "over"})}, ({"d": {"street": ""}},)),
}  # fmt: skip

REFUSED = {
    "multiple_of": ({"multipleOf": 5, "type": "integer"}, "multipleOf"),
    "set": ({"items": INT, "type": "array", "uniqueItems": True}, "uniqueItems"),
    "frozenset": ({"items": STR, "type": "array", "uniqueItems": True}, "uniqueItems"),
}
NEEDS_NAMES = ("dict of an Enum",)  # llguidance knows no propertyNames


def drawn(grammar: Any, seed: int) -> str:
    """An output that a grammar allows: at random, and to its end as soon as that may be, when it becomes long."""
    matcher, chance, done = grammar.matcher(), random.Random(seed), bytearray()
    while True:
        may = sorted(allowed(matcher))
        assert may, bytes(done)
        if EOS in may and (len(done) > 30 or chance.random() < 0.5 or len(may) == 1):
            return done.decode()
        # Printable ASCII: other bytes are characters that stand for nothing here.
        plain = [byte for byte in may if 33 <= byte < 127] or [byte for byte in may if byte < 256]
        closing = [byte for byte in plain if chr(byte) in '"}]']
        byte = chance.choice(closing if len(done) > 30 and closing and chance.random() < 0.5 else plain)
        assert matcher.accept(byte)
        done.append(byte)
        assert len(done) < 2000, bytes(done)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("name", TAKEN)
def test_is_taken_and_what_is_generated_is_valid(name: str, library: str):
    if library == "llguidance" and name in NEEDS_NAMES:
        pytest.skip("llguidance has no propertyNames, as the page says")
    schema, values = TAKEN[name]
    grammar = compiled(byte_backend(library), "json_schema", json.dumps(rewrite_schema(schema, "x")))
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for value in values:
        checker.validate(value)
        assert takes(grammar, json.dumps(value, separators=(",", ":"))), value
    for seed in range(8):
        checker.validate(json.loads(drawn(grammar, seed)))


@pytest.mark.parametrize("name", TAKEN)
def test_a_strict_tool_may_have_it(name: str):
    """Definitions of a property's own schema stand at the root, as pydantic has them."""
    schema, values = TAKEN[name]
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    parameters = {**model(("v",), v=inner), "additionalProperties": False, "$defs": schema.get("$defs", {})}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = tool_choice_schema([tool], "f", False, {"f"})
    grammar = compiled(byte_backend("xgrammar"), spec.kind, spec.text)
    for value in values:
        call = [{"name": "f", "parameters": {"v": value}}]
        assert takes(grammar, json.dumps(call, separators=(",", ":"))), value


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name_and_the_page_says_so(name: str):
    schema, keyword = REFUSED[name]
    with pytest.raises(InvalidRequest, match=keyword):
        rewrite_schema(schema, "x")
    tool = {"type": "function", "function": {"name": "f", "parameters": model(("v",), v=schema)}}
    with pytest.raises(InvalidRequest, match=keyword):
        tool_choice_schema([tool], "f", False, {"f"})
    assert f"400: #/{keyword}" in PAGE.read_text()
