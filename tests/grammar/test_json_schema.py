"""Schemas: what is generated is valid as the user wrote it, or the request is refused by keyword."""

from __future__ import annotations

import json

import jsonschema
import pytest
from grammar_support import CASES, Case, byte_backend, compact, compiled, takes

from tokenspeed.grammar import json_schema
from tokenspeed.grammar.interface import GrammarError, GrammarOptions
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.schema_values import MAX_ENUM
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.protocol.errors import InvalidRequest

SERVED = [case for case in CASES if not case.refused]
REFUSED = [case for case in CASES if case.refused]


def named(cases: list[Case]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", named(SERVED))
def test_table_agrees_with_the_standard(case: Case):
    """The table itself: except for what is only not made up, `jsonschema` has the same opinion."""
    validator = jsonschema.Draft202012Validator
    if isinstance(case.schema, dict) and isinstance(case.schema.get("items"), list):
        validator = jsonschema.Draft7Validator
    checker = validator(case.schema, format_checker=validator.FORMAT_CHECKER)
    for value in case.good:
        assert checker.is_valid(value), value
    for value in case.bad:
        # Not valid, or narrower than the standard on purpose: no made-up properties, keywords imply their type.
        narrowed = case.name in ("properties are not made up", "minimum alone", "required alone")
        narrowed |= case.name.startswith("no properties")
        narrowed |= case.name.startswith(("format", "$ref with description", "$ref to a property", "patternProperties"))
        assert narrowed or not checker.is_valid(value), value


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("case", named(SERVED))
def test_generates_what_is_valid_and_nothing_else(case: Case, library: str):
    text = json.dumps(rewrite_schema(case.schema, "x"))
    if (case.name, library) == ("propertyNames", "llguidance"):
        with pytest.raises(GrammarError, match="propertyNames"):
            byte_backend(library).compile("json_schema", text)
        return
    grammar = compiled(byte_backend(library), "json_schema", text)
    for value in case.good:
        assert takes(grammar, compact(value)), value
    for value in case.bad:
        assert not takes(grammar, compact(value)), value


@pytest.mark.parametrize("case", named(REFUSED))
def test_what_cannot_be_enforced_is_refused_by_name(case: Case):
    with pytest.raises(InvalidRequest) as raised:
        rewrite_schema(case.schema, "response_format")
    assert case.refused in raised.value.message
    assert raised.value.param == "response_format"


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        ({"enum": list(range(MAX_ENUM + 1))}, "the limit is 1000"),
        ({"properties": {f"p{i}": {} for i in range(json_schema.MAX_PROPERTIES + 1)}}, "the limit is 256"),
        ({"anyOf": [{"type": "array", "items": {"anyOf": [{}] * 80}}] * 80}, "more than 4000 schemas"),
        ({"description": "x" * json_schema.MAX_SCHEMA_CHARS}, "longer than"),
    ],
)
def test_sizes_are_bounded(schema: dict, limit: str):
    with pytest.raises(InvalidRequest, match=limit):
        rewrite_schema(schema, "x")


def test_depth_is_bounded():
    schema: dict = {}
    for _ in range(json_schema.MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="deep"):
        rewrite_schema(schema, "x")
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="deep"):
        rewrite_schema(schema, "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 3}, {"type": []}, {"properties": []}, {"required": "a", "properties": 1}, {"enum": []},
        {"enum": "a"}, {"anyOf": []}, {"anyOf": 1}, {"type": "string", "pattern": 1}, {"type": "array", "items": 1},
        {"type": "string", "minLength": "1"}, {"type": "integer", "minimum": "1"}, {"$ref": 1}, {"allOf": 1},
        {"allOf": [1]}, {"type": "object", "patternProperties": 1}, {"type": "array", "minItems": -1}, 3, None, [],
        {"type": "integer", "exclusiveMinimum": True}, {"type": {"a": 1}}, {"type": "array", "prefixItems": 1},
    ],
)  # fmt: skip
def test_malformed_schemas_are_the_users_fault(schema: object):
    with pytest.raises(InvalidRequest):
        rewrite_schema(schema, "x")


def test_recursive_merges_end():
    """A schema that doubles with every level is cut off by its number of nodes, quickly."""
    definitions = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}], "minimum": i}
        for i in range(13)
    }
    definitions["a13"] = {"type": "integer"}
    with pytest.raises(InvalidRequest, match="more than 4000 schemas"):
        rewrite_schema({"$ref": "#/$defs/a0", "$defs": definitions, "maximum": 100}, "x")


@pytest.mark.parametrize("library", BACKENDS)
def test_layout(library: str):
    """Free layout has an end; the fixed one has one form."""
    text = json.dumps(rewrite_schema({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "x"))
    free = compiled(byte_backend(library), "json_schema", text)
    assert takes(free, '{\n  "a": 1\n}')
    assert not takes(free, "{" + " " * 40 + '"a":1}')
    fixed = compiled(byte_backend(library, GrammarOptions(any_whitespace=False)), "json_schema", text)
    assert not takes(fixed, '{\n  "a": 1\n}')
    assert takes(fixed, '{"a": 1}') or takes(fixed, '{"a":1}')


def test_references_of_a_branch_that_is_left_out_are_left_out():
    """A definition that only an empty branch needs may be empty itself; a chain of references stays linear."""
    empty = {"type": "integer", "minimum": 3, "maximum": 2}
    branch = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    done = rewrite_schema({"anyOf": [branch, {"$ref": "#/$defs/i"}], "$defs": {"e": empty, "i": {"minimum": 1}}}, "x")
    assert list(done["$defs"].values()) == [{"type": "number", "minimum": 1}]
    links = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}, {"type": "null"}]} for i in range(1000)}
    long = {"$ref": "#/$defs/n0", "$defs": {**links, "n1000": {"type": "integer"}}}
    assert len(rewrite_schema(long, "x")["$defs"]) == 1001


@pytest.mark.parametrize("name", ["B with required constants", "('#/$defs/B',)", "B/required"])
def test_a_changed_branch_of_one_of_has_a_name_that_no_user_can_write(name: str):
    """B with its constant required was kept under a made-up pointer, which a user's own definition could have: that
    one then was B."""
    branch = {key: {"type": "object", "properties": {"k": {"const": key}}} for key in ("A", "B")}
    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    spelled = name.replace("/", "~1")
    schema = {
        "properties": {"union": union, "own": {"$ref": f"#/$defs/{spelled}"}},
        "$defs": {**branch, name: {"type": "integer"}},
    }
    done = rewrite_schema(schema, "x")
    own = done["properties"]["own"]["$ref"].removeprefix("#/$defs/")
    assert done["$defs"][own] == {"type": "integer"}
    assert sum(each.get("required") == ["k"] for each in done["$defs"].values()) == 2


def test_properties_may_have_the_names_of_keywords():
    """A property named $ref was "malformed"; an anchor below a property named enum was not found."""
    inner = {"$anchor": "x", "type": "integer"}
    named = {"$ref": {"$ref": "#/$defs/a"}, "$anchor": {"type": "string"}, "enum": inner, "b": {"$ref": "#x"}}
    done = rewrite_schema({"properties": named, "$defs": {"a": {"type": "null"}}}, "x")
    found = {name: each.get("$ref", "").removeprefix("#/$defs/") for name, each in done["properties"].items()}
    assert done["$defs"][found["$ref"]] == {"type": "null"}
    assert done["$defs"][found["b"]] == {"type": "integer"}
    assert rewrite_schema({"enum": [{"$ref": ["a"]}]}, "x") == {"enum": [{"$ref": ["a"]}]}
