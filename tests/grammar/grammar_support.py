"""A vocabulary of single bytes, to try a grammar on any text without a model; the table of schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed.grammar.interface import Backend, CompiledGrammar, GrammarOptions, Vocabulary
from tokenspeed.grammar.select import open_backend
from tokenspeed.protocol.grammar import GrammarKind

EOS = 256
SPECIAL = 257  # spelled <tool>
BYTES = Vocabulary(
    tokens=[bytes([byte]) for byte in range(256)] + [b"</s>", b"<tool>"], special_ids=(SPECIAL,), eos_token_ids=(EOS,)
)


def byte_backend(name: str, options: GrammarOptions | None = None) -> Backend:
    return open_backend(name, BYTES, options or GrammarOptions())


def compiled(backend: Backend, kind: GrammarKind, text: str) -> CompiledGrammar:
    return backend.load(backend.compile(kind, text))


def allowed(matcher: Any) -> set[int]:
    """Ids that a matcher allows next."""
    row = np.zeros(BYTES.num_words, dtype=np.int32)
    if not matcher.fill(row):
        return set(range(len(BYTES.tokens)))
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(BYTES.tokens)]
    return set(np.flatnonzero(bits).tolist())


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Whether an output may be exactly this text. Checks on the way that mask and acceptance agree."""
    matcher = grammar.matcher()
    for byte in text.encode():
        may = byte in allowed(matcher)
        assert matcher.accept(byte) == may, f"mask and acceptance differ at byte {byte} of {text!r}"
        if not may:
            return False
    return EOS in allowed(matcher)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Case:
    """A schema with values it must be able to generate and values it must not. `refused`: part of the 400 instead."""

    name: str
    schema: Any
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    refused: str = ""


def obj(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


INT, STR = {"type": "integer"}, {"type": "string"}

CASES = (
    Case("type string", STR, ("", "a", "é\"\\"), (1, None)),
    Case("type integer", INT, (0, -12), ("1", 1.5)),
    Case("type number", {"type": "number"}, (1, -1.5, 100000.0), ("x",)),
    Case("type boolean", {"type": "boolean"}, (True, False), (1, None)),
    Case("type null", {"type": "null"}, (None,), (0,)),
    Case("type list", {"type": ["integer", "null"]}, (3, None), ("x",)),
    Case("no schema", {}, (1, "a", [1, {"a": None}]), ()),
    Case("boolean schema", True, (1, {"b": [1]}), ()),
    Case("false", False, refused="no value"),
    Case("type unknown", {"type": "foo"}, refused="'foo' is not a JSON type"),
    Case("enum", {"enum": [1, "a", None, {"x": [1]}, True]}, (1, "a", None, {"x": [1]}, True), (2, "b", False)),
    Case("enum with type", {"type": "string", "enum": ["a", 1]}, ("a",), (1,)),
    Case("enum with sibling", {"enum": ["a", "bb", 1], "minLength": 2}, ("bb", 1), ("a",)),
    Case("enum with pattern", {"enum": ["xa", "b"], "pattern": "a$"}, ("xa",), ("b",)),
    Case("enum with format", {"enum": ["2020-2-1", "2020-02-01"], "format": "date"}, ("2020-02-01",), ("2020-2-1",)),
    Case("enum with bounds", {"enum": [1, 2, 3], "exclusiveMinimum": 1, "maximum": 2.5}, (2,), (1, 3)),
    Case("enum with items", {"enum": [[1]], "items": INT}, refused="items: not beside an enum"),
    Case("const", {"const": {"a": 1}}, ({"a": 1},), ({"a": 2}, 1)),
    Case("const of another type", {"const": 1, "type": "string"}, refused="no value"),
    Case("minimum, maximum", {**INT, "minimum": 3, "maximum": 12}, (3, 12), (2, 13, -5)),
    Case("minimum of a fraction", {**INT, "minimum": 1.5}, (2,), (1,)),
    Case("minimum alone", {"minimum": 5}, (5, 6.5), (4, "x")),
    Case("exclusive bounds", {**INT, "exclusiveMinimum": 3, "exclusiveMaximum": 6}, (4, 5), (3, 6)),
    Case("bounds of numbers", {"type": "number", "minimum": 0.5, "maximum": 1.5}, (0.5, 1, 1.25), (0.25, 1.75, 2)),
    Case("multipleOf", {**INT, "multipleOf": 3}, refused="keyword multipleOf"),
    Case("minLength, maxLength", {**STR, "minLength": 2, "maxLength": 3}, ("ab", "é€x"), ("a", "abcd")),
    Case("length out of order", {**STR, "minLength": 3, "maxLength": 2}, refused="minLength 3 is above"),
    Case("pattern", {**STR, "pattern": "^[a-c]{2}$"}, ("ab",), ("a", "abc", "ad")),
    Case("pattern without anchors", {**STR, "pattern": "[0-9]+"}, ("12",), ("x",)),
    Case("pattern of alternatives", {**STR, "pattern": "^a$|^bc$"}, ("a", "bc"), ("ab", "c")),
    Case("pattern with escapes", {**STR, "pattern": "^\\d{2}-\\w\\.\\s$"}, ("12-a. ",), ("1x-a. ",)),
    # The bug: xgrammar took more digits in front of an optional group that ends in a repetition.
    Case("pattern with an optional group", {**STR, "pattern": "^\\d{1,3}(\\.\\d{1,2})?$"}, ("1", "123.45"),
         ("1234", "1.", "1.234")),
    Case("pattern with a group once or more", {**STR, "pattern": "^(a1{1,2}|1a){1,}$"}, ("a1", "1a", "1aa11"),
         ("", "1a1", "1a1a1")),
    Case("pattern with a group twice or more", {**STR, "pattern": "^(a1{1,2}|1a){2,}$"}, ("a1a1", "1aa11"),
         ("a1", "1a1a1")),
    Case("format date-time", {**STR, "format": "date-time"}, ("2020-02-01T10:20:30Z", "2020-02-01T10:20:30.5Z"),
         ("2020-02-01T10:20:3012Z", "2020-02-01T10:20:30")),
    Case("pattern with look-ahead", {**STR, "pattern": "(?=a)b"}, refused="look-ahead"),
    Case("pattern with inner anchor", {**STR, "pattern": "x(^a|b)"}, refused="^ at 2"),
    Case("pattern with length", {**STR, "pattern": "^a+$", "minLength": 2}, ("aa", "aaa"), ("a", "ab")),
    Case("pattern with lengths", {**STR, "pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 2, "maxLength": 8},
         ("ab", "abcd", "abc-a-b"), ("a", "abcdefghi", "ab-", "AB")),
    Case("pattern of one length", {**STR, "pattern": "^\\d{3}$", "maxLength": 5}, ("123",), ("12", "1234")),
    Case("pattern with a great length", {**STR, "pattern": "^[a-z]+$", "maxLength": 1000},
         ("a" * 20, "a" * 128), ("", "A", "a" * 1001)),
    Case("pattern of more than a great length", {**STR, "pattern": "^[a-z]{300,}$", "maxLength": 1000},
         ("a" * 300,), ("a" * 299, "a" * 1001)),
    Case("pattern of another length", {**STR, "pattern": "^[a-z]{3}$", "minLength": 4},
         refused="not together with minLength 4"),
    Case("pattern of pydantic's Decimal", {**STR, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
         ("0", "-12.50", "7."), ("", ".", "-", "1.2.3", "a")),
    Case("pattern of Decimal, places", {**STR, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"},
         ("0", "-12.50", "+7"), ("", "-.", "1.234")),
    Case("pattern of Decimal, digits, places",
         {**STR, "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
         ("0", "-123.45"), ("", "-")),
    Case("pattern of Decimal, digits",
         {**STR, "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)"},
         ("0", "1234", "-1.234", "12.34"), ("", ".", "-+")),
    Case("format date", {**STR, "format": "date"}, ("2020-02-01",), ("x", "2020-2-1", "4080-04-31")),
    Case("format date, length", {**STR, "format": "date", "minLength": 10, "maxLength": 20}, ("2020-02-01",), (1,)),
    Case("format date of no length", {**STR, "format": "date", "maxLength": 9}, refused="no date has a length between"),
    Case("format ipv4 of some length", {**STR, "format": "ipv4", "minLength": 9}, ("100.20.30.40",), ("1.2.3.4", "x")),
    Case("format email of some length", {**STR, "format": "email", "minLength": 5, "maxLength": 50},
         ("ada@example.com",), ("a@b", "x", "a" * 60 + "@b.de")),
    Case("format date-time of some length", {**STR, "format": "date-time", "maxLength": 30},
         ("2020-02-01T10:20:30Z", "2020-02-01T10:20:30.12+01:00"), ("2020-02-30T10:20:30Z", "x")),
    Case("format uri of some length", {**STR, "format": "uri", "minLength": 1, "maxLength": 80},
         ("https://example.org/a",), ("", "x", "https://example.org/" + "a" * 80)),
    Case("format uri, great length", {**STR, "format": "uri", "minLength": 1, "maxLength": 2083},
         ("https://example.org/a?b=c%20d#e",), ("", "x", "https://a.b/%2", "https://a.b/" + "a" * 2080)),
    Case("format json-pointer, great length", {**STR, "format": "json-pointer", "maxLength": 300},
         ("", "/a/b~1c"), ("x", "/" + "a" * 300)),
    Case("format uri-template, great length", {**STR, "format": "uri-template", "maxLength": 300},
         ("http://a.b/c",), ("{", "a" * 301)),
    Case("format uri, not empty", {**STR, "format": "uri", "minLength": 1}, ("http://a/b",), ("",)),
    Case("format uuid", {**STR, "format": "uuid"}, ("123e4567-e89b-12d3-a456-426614174000",), ("x",)),
    Case("format ipv4", {**STR, "format": "ipv4"}, ("1.2.3.4",), ("1.2.3", "x", "1.2.3.019")),
    Case("format unknown", {**STR, "format": "color"}, ("x",), (1,)),
    Case("properties, required", obj(("a",), a=INT, b=STR), ({"a": 1}, {"a": 1, "b": ""}), ({}, {"b": ""}, {"a": "x"})),
    Case("properties are not made up", obj(a=INT), ({}, {"a": 1}), ({"c": 1},)),
    Case("required without property", {**obj(("a", "z"), a=INT)}, ({"a": 1, "z": [2]},), ({"a": 1},)),
    Case("required alone", {"required": ["a"]}, ({"a": 1},), ({}, 1)),
    Case(
        "required, but closed", {**obj(("z",), a=INT), "additionalProperties": False}, refused="z is not among"
    ),
    Case("additionalProperties false", {**obj(a=INT), "additionalProperties": False}, ({"a": 1},), ({"b": 1},)),
    Case("additionalProperties true", {**obj(a=INT), "additionalProperties": True}, ({"a": 1, "b": []},), ({"a": ""},)),
    Case(
        "additionalProperties schema", {**obj(a=INT), "additionalProperties": STR}, ({"a": 1, "b": "x"},), ({"b": 1},)
    ),
    Case("additionalProperties not", {**obj(a=INT), "additionalProperties": {"not": {}}}, ({"a": 1},), ({"b": 1},)),
    Case("any object", {"type": "object", "description": "x"}, ({}, {"q": {"r": 1}}), ([], 1)),
    # The bug: an empty list of properties was taken for no list, and arguments were made up.
    Case("no properties", {"type": "object", "properties": {}}, ({},), ({"key": "value"}, [])),
    Case("no properties, inside", obj(("a",), a={"properties": {}}), ({"a": {}},), ({"a": {"b": 1}},)),
    Case("no properties, but others", {"properties": {}, "additionalProperties": True}, ({}, {"q": 1}), (1,)),
    Case("property false", obj(a=False, b=INT), ({}, {"b": 1}), ({"a": 1},)),
    Case("minProperties", {"type": "object", "minProperties": 1, "maxProperties": 2}, ({"a": 1},), ({},)),
    Case("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a+$"}}, ({"aa": 1},), ({"b": 1},)),
    Case(
        "propertyNames, but closed",
        {"type": "object", "additionalProperties": False, "propertyNames": {"pattern": "^a+$"}},
        ({},),
        ({"aa": 1},),
    ),
    Case("patternProperties", {"type": "object", "patternProperties": {"^x-": STR}}, ({"x-": "1"},), ({"x-": 1},)),
    Case(
        "patternProperties over a property",
        {**obj(ab=INT), "patternProperties": {"^a": {"minimum": 5}}},
        refused="also matches the property 'ab'",
    ),
    Case("dependentRequired", {**obj(a=INT), "dependentRequired": {"a": ["b"]}}, refused="keyword dependentRequired"),
    Case("dependentSchemas", {"dependentSchemas": {"a": {}}}, refused="keyword dependentSchemas"),
    Case("unevaluatedProperties", {"type": "object", "unevaluatedProperties": STR}, refused="unevaluatedProperties"),
    Case("items", {"type": "array", "items": INT}, ([], [1, 2]), (["a"],)),
    Case("any array", {"type": "array"}, ([], [1, "a"]), ({},)),
    Case("minItems, maxItems", {"type": "array", "items": INT, "minItems": 2, "maxItems": 3}, ([1, 2],),
         ([1], [1] * 4)),
    Case("prefixItems", {"type": "array", "prefixItems": [INT, STR], "items": False}, ([1, "a"],),
         (["a"], [1, "a", 2])),
    Case("items as a list", {"type": "array", "items": [INT], "additionalItems": STR}, ([1], [1, "a"]),
         (["a"], [1, 1])),
    Case("no items", {"type": "array", "items": False}, ([],), ([1],)),
    Case("uniqueItems", {"type": "array", "uniqueItems": True}, refused="uniqueItems"),
    Case("uniqueItems of an enum",
         {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 1},
         (["a"], ["a", "b"], ["b", 3], ["a", "b", 3]), ([], ["a", "a"], ["c"])),
    Case("uniqueItems of booleans", {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
         ([], [True], [False, True]), ([True, True],)),
    Case("uniqueItems of one", {"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, ([], [1]),
         ([1, 1],)),
    Case("uniqueItems of too few", {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2},
         refused="minItems 2 is above the 1"),
    Case("contains", {"type": "array", "contains": INT}, refused="keyword contains"),
    Case("anyOf", {"anyOf": [INT, STR]}, (1, "a"), (None, [])),
    # The bug: a branch that no value can obey made the whole schema a 400, or the library failed on it.
    Case("anyOf with an empty range", {"anyOf": [{**INT, "minimum": 3, "maximum": 2}, STR]}, ("a",), (2, 3)),
    Case("anyOf with empty lengths", {"anyOf": [{**STR, "minLength": 3, "maxLength": 2}, INT]}, (1,), ("abc",)),
    Case("anyOf with an empty object", {"anyOf": [
        {**obj(("a",), a=INT), "maxProperties": 0}, {**obj(a=INT), "additionalProperties": False, "minProperties": 2},
        obj(("z",), a=INT, z={**INT, "exclusiveMinimum": 3, "exclusiveMaximum": 4}), INT]}, (1,), ({"a": 1}, {"z": 3})),
    Case("anyOf with an empty array", {"anyOf": [
        {"type": "array", "prefixItems": [INT], "items": False, "minItems": 2}, INT]}, (1,), ([1], [1, 1])),
    Case("anyOf with an empty $ref", {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": INT}],
        "$defs": {"a": obj(("b",), b={"$ref": "#/$defs/c"}), "c": {**INT, "minimum": 3, "maximum": 2}}},
        ([1],), ({"b": 3},)),
    Case("anyOf that contradicts its siblings", {"type": "string", "anyOf": [INT, {"maxLength": 1}]},
        ("a",), (1, "ab")),
    Case("several types, one empty", {"type": ["integer", "null"], "minimum": 3, "maximum": 2}, (None,), (2, 3)),
    Case("anyOf of nothing but empty ranges",
        {"anyOf": [{**INT, "minimum": 3, "maximum": 2}, {"enum": [1], "type": "string"}]},
        refused="#/anyOf/0: no integer fits minimum 3"),
    Case("anyOf beside keywords", {**obj(a=INT, b=INT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ({"a": 1}, {"b": 1}), ({},)),
    Case("oneOf of types", {"oneOf": [INT, STR]}, (1, "a"), (None,)),
    Case("oneOf by a constant", {"oneOf": [obj(("k", "x"), k={"const": "a"}, x=INT), obj(("k",), k={"const": "b"})]},
         ({"k": "a", "x": 1}, {"k": "b"}), ({"k": "c"}, {"k": "a"})),
    Case("oneOf by a constant that is not required", {"oneOf": [obj(k={"const": "a"}, x=INT), {"$ref": "#/$defs/b"}],
        "$defs": {"b": obj(k={"const": "b"}, next={"oneOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]})}},
         ({"k": "a", "x": 1}, {"k": "b"}, {"k": "b", "next": {}}), ({"k": "c"}, {})),
    Case("oneOf in oneOf", {"oneOf": [{"oneOf": [obj(k={"const": "a"}, c={"const": 1}), obj(k={"const": "a"},
        c={"const": 2})]}, obj(k={"const": "b"})]}, ({"k": "a", "c": 2}, {"k": "b"}), ({"k": "a"}, {"c": 1})),
    Case("oneOf that overlaps", {"oneOf": [{**INT, "minimum": 0}, {**INT, "maximum": 0}]}, refused="oneOf"),
    Case("allOf", {"allOf": [obj(("a",), a=INT), obj(("b",), b=STR)]}, ({"a": 1, "b": ""},), ({"a": 1}, {"b": ""})),
    Case("allOf beside keywords", {**INT, "allOf": [{"minimum": 3}, {"maximum": 4}]}, (3, 4), (2, 5)),
    Case("allOf of closed objects", {"allOf": [{**obj(a=INT), "additionalProperties": False}, obj(b=INT)]},
         refused="additionalProperties"),
    Case("not", {"not": STR}, refused="keyword not"),
    Case("if", {"if": INT, "then": {"minimum": 5}}, refused="keyword if"),
    Case("$ref", {"$ref": "#/$defs/a", "$defs": {"a": INT}}, (1,), ("a",)),
    Case("$ref with siblings", {"$ref": "#/$defs/a", "$defs": {"a": INT}, "minimum": 5}, (6,), (1, "a")),
    Case("$ref with description", {"properties": {"x": {"$ref": "#/$defs/a", "description": "d"}}, "$defs": {"a": INT}},
         ({"x": 1},), ({"x": ""},)),
    Case("$ref, escaped", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INT}}, (1,), ("a",)),
    Case("$ref to a property", {"properties": {"x": INT, "y": {"$ref": "#/properties/x"}}}, ({"y": 1},), ({"y": ""},)),
    Case("$ref, recursive", {"$ref": "#/definitions/n", "definitions": {
        "n": obj(("next",), next={"anyOf": [{"$ref": "#/definitions/n"}, {"type": "null"}]})}},
         ({"next": None}, {"next": {"next": None}}), ({}, {"next": 1})),
    Case("$ref to the root", obj(kids={"type": "array", "items": {"$ref": "#"}}), ({"kids": [{}, {"kids": []}]},),
         ({"kids": [1]},)),
    Case("$ref to an anchor", {"$ref": "#a", "$defs": {"n": {"$anchor": "a", "type": "integer"}}}, (1,), ("x",)),
    Case("$ref to no anchor", {"$ref": "#a", "$defs": {"n": {"$anchor": "b"}}}, refused="has the $anchor 'a'"),
    Case("$ref to elsewhere", {"$ref": "https://example.com/x"}, refused="only #... can be followed"),
    Case("$ref to nothing", {"$ref": "#/$defs/x"}, refused="there is no #/$defs/x"),
    Case("$ref to itself", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, refused="back to itself"),
    Case("allOf that leads to itself", {"allOf": [{"$ref": "#"}]}, refused="back to itself"),
    Case("$dynamicRef", {"$dynamicRef": "#a"}, refused="keyword $dynamicRef"),
    Case("keywords of two types", {"minimum": 1, "minLength": 1}, refused="add type"),
)  # fmt: skip
