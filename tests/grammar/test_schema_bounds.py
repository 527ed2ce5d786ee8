"""Schemas that are small and ask for endless work: rewriting them stays within its budget. Nothing here looks at a
clock; where a bound is missing these tests do not end. And schemas that the libraries would take wrongly."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import xgrammar
from grammar_support import BYTES, byte_backend, compiled, takes

from tokenspeed.grammar import xgrammar_backend
from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.name_pattern import NamePattern
from tokenspeed.grammar.probe import probe
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.grammar.tools import tool_choice_schema
from tokenspeed.protocol.errors import InvalidRequest

NAMES = ("", "a", "b", "S", "S_x", "xS", "FOO", "a1", "ab12", "aab", "abab", "a-b", "a]", "é", "a\nb", "x" * 40)
PATTERNS = (
    *(
        "",
        "a",
        "^a",
        "a$",
        "^a$|b",
        "^S_",
        "[a-z]+",
        "^[a-z]+$",
        "^[^a-z]+$",
        "^(ab)+$",
        "^(ab|a)*b$",
        "^a{2}b",
        "x{3,}",
    ),
    *("^x{1,40}$", "^x{0,39}$", "^(x{2}){20}$", "(a|b)?1", "^a.b$", "^a\\-b$", "\\d\\d", "^\\w+$", "[\\]1]", "^[]a]+$"),
    *("^(?:a|(?P<n>b))+$", "\\x61\\u0062", "^a??b", "a{b", "é", "()", "(|a)b", "(a*)*b"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_match_as_with_pythons_engine(pattern: str):
    ours = NamePattern(pattern, Budget())
    for name in NAMES:
        assert ours.is_in(name) == bool(re.search(pattern, name, re.ASCII)), name


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a|aa)*$", "^(((a*)*)*)*$", "^a*a*a*a*a*a*a*a*b$", "^(a?){60}$"])
def test_a_pattern_that_backtracks_does_not_hold_the_server_up(pattern: str):
    """Python's engine was asked, on the server's loop: `^(a+)+$` and forty letters stopped it for good."""
    assert not NamePattern(pattern, Budget()).is_in("a" * 100 + "!")
    schema = {"type": "object", "patternProperties": {pattern: {"type": "string"}}, "properties": {"a" * 100 + "!": {}}}
    assert "patternProperties" in rewrite_schema(schema, "x")


def test_patterns_have_a_budget():
    schema = {
        "type": "object",
        "patternProperties": {"((((a{1,9}){1,9}){1,9}){1,9})b$": {}},
        "properties": {f"{place}" + "a" * 1500: {} for place in range(60)},
    }
    with pytest.raises(InvalidRequest, match="comparisons"):
        rewrite_schema(schema, "x")


@pytest.mark.parametrize("pattern", [r"^\p{L}$", "a**", "*", "^[z-a]$"])
def test_a_pattern_that_python_does_not_know_is_refused(pattern: str):
    """`re.error` is no ValueError: the answer was 500."""
    schema = {"type": "object", "patternProperties": {pattern: {}}, "properties": {"a": {}}}
    with pytest.raises(InvalidRequest, match="regular expression"):
        rewrite_schema(schema, "x")


def test_a_required_name_obeys_a_pattern_that_is_found_in_it():
    """The pattern was taken for the whole name here, so `S_x` could have any value."""
    schema = {"type": "object", "patternProperties": {"^S_": {"type": "integer"}}, "required": ["S_x"]}
    assert rewrite_schema(schema, "x")["properties"] == {"S_x": {"type": "integer"}}
    with pytest.raises(InvalidRequest, match="S_x is not among"):
        rewrite_schema({**schema, "patternProperties": {"^S_": False}}, "x")


def test_references_that_double_with_every_step_are_counted():
    """Twenty lines of $defs were 2^40 schemas."""
    definitions: dict = {"a40": {"type": "string"}, "b40": {"type": "string"}}
    for step in range(40):
        both = [{"$ref": f"#/$defs/a{step + 1}"}, {"$ref": f"#/$defs/b{step + 1}"}]
        definitions[f"a{step}"] = {"allOf": both}
        definitions[f"b{step}"] = {"allOf": both[::-1], "minLength": 1}
    with pytest.raises(InvalidRequest, match="more than 4000 schemas"):
        rewrite_schema({"$ref": "#/$defs/a0", "$defs": definitions}, "x")


def test_merging_large_schemas_over_and_over_has_a_budget():
    large = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(200)}}
    parts = [{"$ref": f"#/$defs/{name}"} for name in "ab" * 1500]
    with pytest.raises(InvalidRequest, match="comparisons"):
        rewrite_schema({"allOf": parts, "$defs": {"a": large, "b": {**large, "minProperties": 1}}}, "x")


def test_long_oneof_of_constants_is_cheap():
    """Every pair was compared, value by value: minutes."""
    many = {"oneOf": [{"enum": [10 * place + last for last in range(10)]} for place in range(1500)]}
    assert len(rewrite_schema(many, "x")["anyOf"]) == 1500
    with pytest.raises(InvalidRequest, match="may match two"):
        rewrite_schema({"oneOf": [*many["oneOf"], {"const": 77.0}]}, "x")
    assert rewrite_schema({"oneOf": [*many["oneOf"], {"const": True}]}, "x")


def test_long_oneof_of_objects_has_a_budget():
    def branch(place: int) -> dict:
        return {"type": "object", "properties": {"kind": {"const": place}}, "required": ["kind"]}

    assert len(rewrite_schema({"oneOf": [branch(place) for place in range(200)]}, "x")["anyOf"]) == 200
    with pytest.raises(InvalidRequest, match="comparisons"):
        rewrite_schema({"oneOf": [branch(place) for place in range(1300)]}, "x")


def test_two_long_enums_are_compared_once():
    first, second = list(range(8_000)), list(range(7_999, 16_000))
    assert rewrite_schema({"allOf": [{"enum": first}, {"enum": second}]}, "x") == {"enum": [7_999]}


def test_the_budget_is_spent_once():
    budget = Budget(10)
    budget.spend(10)
    with pytest.raises(GrammarError, match="make it smaller"):
        budget.spend(1)


QUOTES = ('^"$', "^a\\\\b$", "^\\n$", "^[\\n\\t]$", "^(a|\\x22)$", "^[^é]$", "^[ -\x7f]$", "^[\\\\]$")
PLAIN = (
    "^[^a]$",
    "^.$",
    "^\\s$",
    "^\\W$",
    "^[\"']$",
    "^[ -~]$",
    "^[\\t ]$",
    "^[\\x00-\\x7f]$",
    "^é|[à-ü]$",
    "^[^<>]+$",
)


@pytest.mark.parametrize("pattern", PLAIN)
def test_a_pattern_never_leaves_its_json_string(pattern: str):
    for library in BACKENDS:
        grammar = compiled(byte_backend(library), "json_schema", json.dumps(rewrite_schema({"pattern": pattern}, "x")))
        for char in '"\\\n\t\x07':
            assert not takes(grammar, f'"{char}"'), (library, char)


WITHOUT_QUOTES = (
    '^[^"]+$',
    "^[^'\"]*$",
    '^[^<>"]+$',
    r'^[^"\\]*$',
    r"^[^\\]+$",
    r"^[^\w\"]+$",
    r'^([^"a]|b)+c?$',
    r"^[^!-#\[-\]]$",
    r'^[^"a-]+$',
    r"^[\x01-!#-~]+$",
    "^[^<>]+$",
    r"^.+$",
    r"^[ !#-~]+$",
)
ESCAPES = {
    r"\"": '"', r"\\": "\\", r"\/": "/", r"\n": "\n", r"\t": "\t", r"\b": "\b", r"\f": "\f", r"\r": "\r",
    r"\u0022": '"', r"\u005c": "\\", r"\u005C": "\\", r"\u0007": "\x07", r"\u0000": "\0", r"\u0041": "A",
}  # fmt: skip


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("pattern", WITHOUT_QUOTES)
def test_escaped_characters_obey_the_pattern(library: str, pattern: str):
    r"""The bug: with llguidance `^[^"]+$` wrote \", in four of sixty values."""
    names = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    schema = {"anyOf": [{"type": "string", "pattern": pattern}, names]}
    grammar = compiled(byte_backend(library), "json_schema", json.dumps(rewrite_schema(schema, "x")))
    for escape, char in ESCAPES.items():
        for text in (char, f"x{char}", f"{char}b"):
            value = f'"{text.replace(char, escape)}"'
            assert re.search(pattern, text) or not takes(grammar, value), (pattern, value)
            assert re.search(pattern, text) or not takes(grammar, f"{{{value}: 1}}"), (pattern, value)
    usual = "b" if re.search(pattern, "b") else "!"
    assert takes(grammar, f'"{usual}"') == bool(re.search(pattern, usual))


def test_what_llguidance_cannot_hold_is_refused():
    backend = byte_backend("llguidance")
    with pytest.raises(GrammarError, match="leave the character 0 out"):
        backend.compile("json_schema", json.dumps(rewrite_schema({"pattern": r"^[\x00-!]+$"}, "x")))
    enum = json.dumps({"enum": [{"pattern": r"^[\x00-!]+$"}]})
    assert takes(compiled(backend, "json_schema", enum), json.dumps(json.loads(enum)["enum"][0]))


@pytest.mark.parametrize("pattern", QUOTES)
def test_a_pattern_that_would_leave_its_json_string_is_refused(pattern: str):
    """xgrammar wrote the quote of `^"$` as it is: `\"""` is no JSON."""
    inner = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": pattern}}}
    schema = json.dumps(rewrite_schema({"type": "array", "items": inner}, "x"))
    with pytest.raises(GrammarError, match="only escaped"):
        byte_backend("xgrammar").compile("json_schema", schema)
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": json.loads(schema)}}
    with pytest.raises(GrammarError, match="only escaped"):
        byte_backend("xgrammar").compile("structural_tag", json.dumps(tag))


LENGTHS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 1},
    {"type": "string", "minLength": 2},
    {"type": "string", "minLength": 1, "maxLength": 9},
)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("schema", LENGTHS)
def test_strings_of_limited_length_hold_no_control_characters(library: str, schema: dict[str, Any]):
    """The bug: xgrammar's rule for a character of such a string leaves out line ends alone, so a tab or a control
    character stood raw in it, and the output was no JSON. With xgrammar there are no escapes in them, either: see
    `test_counted_characters_are_one_class`."""
    whole = {
        "type": "object",
        "properties": {"k": schema, "w": {"type": "string", "pattern": "^(a|b){2}$"}, "e": {"enum": ['^"\\\r\n', 1]}},
        "required": ["k", "w", "e"],
    }
    text = json.dumps(rewrite_schema(whole, "x"))
    tag = {"begin": "<t>", "content": {"type": "json_schema", "json_schema": json.loads(text)}, "end": "</t>"}
    tags = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag]}}
    grammars = [(compiled(byte_backend(library), "json_schema", text), "", "")]
    if library == "xgrammar":
        grammars.append((compiled(byte_backend(library), "structural_tag", json.dumps(tags)), "Hm\t<t>", "</t>."))
    for grammar, before, behind in grammars:
        for value in ("ab", "ü 😀", '"\n\\\t\\'):
            for end in (1, '^"\\\r\n'):
                answer = json.dumps({"k": value, "w": "ab", "e": end}, ensure_ascii=False)
                is_allowed = value.isprintable() or library == "llguidance"
                is_allowed |= schema.get("minLength") == 1 and "maxLength" not in schema
                assert takes(grammar, before + answer + behind) == is_allowed, (value, end)
        if "maxLength" not in schema:
            behind_it = json.dumps({"k": 'ab\n"\\', "w": "ab", "e": 1})
            assert takes(grammar, before + behind_it + behind)
        if schema.get("minLength", 0) > 0:
            least = json.dumps({"k": "ü" * schema["minLength"], "w": "ab", "e": 1}, ensure_ascii=False)
            assert takes(grammar, before + least + behind)
            assert not takes(grammar, before + least.replace("ü", "", 1) + behind)
        if "maxLength" in schema:
            most = json.dumps({"k": "ü" * schema["maxLength"], "w": "ab", "e": 1}, ensure_ascii=False)
            assert takes(grammar, before + most + behind)
            assert not takes(grammar, before + most.replace("ü", "üü", 1) + behind)
        for code in range(32):
            assert not takes(grammar, f'{before}{{"k": "a{chr(code)}b", "w": "ab", "e": 1}}{behind}'), code
        assert not takes(grammar, f'{before}{{"k": "ab", "w": "abc", "e": 1}}{behind}')
        length = 13 if "maxLength" in schema else schema["minLength"] - 1
        assert not takes(grammar, f'{before}{{"k": "{"a" * length}", "w": "ab", "e": 1}}{behind}')


@pytest.mark.parametrize("schema", LENGTHS)
def test_counted_characters_are_one_class(schema: dict[str, Any]):
    """The bug: with escapes as an alternative in the counted rule, each mask was a walk over the vocabulary. With 152k
    tokens it took 60 ms at a limit of 10 and 120 at 100, and the server refused the schema as too ambiguous."""
    written = xgrammar_backend._mended(xgrammar.Grammar.from_json_schema(json.dumps(schema)))
    assert written is not None
    (rule,) = re.findall(r"^root_characters ::= (.*)$", written, re.MULTILINE)
    assert rule == r"(([^\"\\\x00-\x1f]))"


def test_words_of_enums_are_no_patterns():
    schema = {"enum": [{"pattern": '"'}], "$defs": {}}
    assert byte_backend("xgrammar").compile("json_schema", json.dumps(rewrite_schema(schema, "x")))


@pytest.mark.parametrize("library", BACKENDS)
def test_a_limited_name_does_not_come_in_as_a_further_property(library: str):
    """`additionalProperties: true` let `Sx` and `no` in with any value."""
    schema = {
        "type": "object",
        "properties": {"T": {"type": "string"}, "no": False},
        "patternProperties": {"^S": {"type": "integer"}},
        "additionalProperties": True,
    }
    for each in (schema, {**schema, "properties": {}}, {**schema, "patternProperties": {}}):
        grammar = compiled(byte_backend(library), "json_schema", json.dumps(rewrite_schema(each, "x")))
        for text in ('{"Sx":"a"}', '{"T":"x","Sx":"a"}', '{"T":"x","S":"a"}', '{"no":1}'):
            assert not takes(grammar, text) or jsonschema.Draft202012Validator(each).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 10**400}, "minimum: beyond"),
        ({"type": "string", "maxLength": 10**400}, "maxLength: beyond"),
        ({"enum": [10**400]}, "enum: 1"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "no integer fits minimum 5 and maximum 1"),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, "no integer fits exclusiveMinimum 5"),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5.0}, "decimals fits exclusiveMinimum 5"),
        ({"type": "object", "required": [1]}, "required: a list of names"),
        ({"type": "object", "required": "ab"}, "required: a list of names"),
    ],
)
def test_what_the_library_would_refuse_without_words_is_named(schema: dict, words: str):
    """The answer was "the grammar cannot be used: " and no more, or the library's own source."""
    with pytest.raises(InvalidRequest, match=words):
        rewrite_schema(schema, "x")


def test_ranges_of_one_number_are_served():
    for bounds in ({"minimum": 5, "maximum": 5}, {"exclusiveMinimum": 4, "exclusiveMaximum": 6}):
        assert rewrite_schema({"type": "integer", **bounds}, "x")["type"] == "integer"
    assert rewrite_schema({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "x")


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 1e-300, "maximum": 2e-300},
        {"minimum": 0.12345671, "maximum": 0.12345679},
        {"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.500001},
        {"exclusiveMinimum": 0.5, "maximum": 0.5},
    ],
)
def test_bounds_closer_than_the_librarys_decimals_are_refused(bounds: dict):
    """xgrammar took an empty text for a number between them."""
    with pytest.raises(InvalidRequest, match="decimals fits"):
        rewrite_schema({"type": "number", **bounds}, "x")


@pytest.mark.parametrize("bounds", [{"minimum": 0.5, "maximum": 0.5}, {"exclusiveMinimum": 0.5, "maximum": 0.500001}])
def test_close_bounds_are_served(bounds: dict):
    text = json.dumps(rewrite_schema({"type": "number", **bounds}, "x"))
    grammar = compiled(byte_backend("xgrammar"), "json_schema", text)
    assert takes(grammar, str(bounds["maximum"])) and not takes(grammar, "")


@pytest.mark.parametrize("text", ["root ::= root", 'root ::= "a" x\nx ::= x'])
def test_a_grammar_that_leads_nowhere_is_refused(text: str):
    """It was a 500 at the first token that nothing may follow."""
    with pytest.raises(GrammarError, match="nothing can come at token"):
        probe(compiled(byte_backend("xgrammar"), "ebnf", text), BYTES)


def forced(parameters: dict) -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return tool_choice_schema([tool], "f", parallel=False).text


@pytest.mark.parametrize("parameters", [{}, {"description": "x"}, {"type": ["object", "null"]}, {"$ref": "#/$defs/a"}])
def test_arguments_of_a_forced_call_are_an_object(parameters: dict):
    """A schema without a type, or of another, gave calls with `false` or a text for arguments."""
    grammar = compiled(
        byte_backend("xgrammar"), "json_schema", forced({**parameters, "$defs": {"a": {"title": "any"}}})
    )
    assert takes(grammar, '[{"name":"f","parameters":{}}]')
    for value in ("false", "null", '"x"', "[]"):
        assert not takes(grammar, f'[{{"name":"f","parameters":{value}}}]')


INT = {"type": "integer"}
LOOSE: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"properties": {"n": {**INT, "multipleOf": 7, "minimum": 3}}}, [{"n": 4}, {}], [{"n": 2}, {"m": 4}, {"n": "x"}]),
    ({"properties": {"l": {"type": "array", "items": INT, "uniqueItems": True}}}, [{"l": [1, 1]}], [{"l": ["x"]}]),
    ({"properties": {"n": {"not": {"const": 3}}}, "required": ["n"]}, [{"n": 3}, {"n": "x"}], [{}, {"m": 1}]),
    ({"properties": {"n": {"oneOf": [INT, {"type": "number"}]}}}, [{"n": 1}], [{"n": "x"}]),
    ({"properties": {"n": INT, "m": INT}, "not": {"required": ["n", "m"]}}, [{"n": 1, "m": 1}], [{"n": "x"}]),
    ({"properties": {"n": INT}, "dependentRequired": {"n": ["m"]}}, [{"n": 1}], [{"n": "x"}]),
    ({"properties": {"s": {"type": "string", "pattern": "(?=a)b"}}}, [{"s": "c"}], [{"s": 1}]),
    ({"properties": {"s": {"$ref": "https://a.example/s"}, "n": INT}}, [{"s": [1], "n": 1}], [{"n": "x"}]),
    (
        {"properties": {"s": {"type": "string", "pattern": "^[A-Z]:\\\\", "minLength": 4}}},
        [{"s": "c:ab"}],
        [{"s": "c:"}],
    ),
    # Nothing but names and types can be held.
    ({"properties": {"ab": INT}, "required": ["ab"], "patternProperties": {"^a": {}}}, [{"ab": 1}], [{"ab": "x"}, {}]),
    ({"patternProperties": {"^a": {}, "^b": {}}}, [{"c": 1}, {}], [1]),
    ({"properties": {f"p{place}": {} for place in range(300)}}, [{"p1": 1}], []),
]


@pytest.mark.parametrize(("parameters", "good", "bad"), LOOSE, ids=[json.dumps(one[0])[:50] for one in LOOSE])
def test_a_forced_tool_without_strict_is_held_as_far_as_that_goes(parameters: dict, good: list, bad: list):
    """The bug: one tool with one keyword that cannot be held made the whole request a 400."""
    parameters = {"type": "object", **parameters}
    grammar = compiled(byte_backend("xgrammar"), "json_schema", forced(parameters))
    for value in good:
        assert takes(grammar, f'[{{"name":"f","parameters":{json.dumps(value, separators=(",", ":"))}}}]'), value
    for value in bad:
        assert not takes(grammar, f'[{{"name":"f","parameters":{json.dumps(value, separators=(",", ":"))}}}]'), value
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequest, match="parameters of the tool 'f'"):
        tool_choice_schema([tool], "f", False, {"f"})


def test_what_can_be_held_is_held_exactly_without_strict():
    names = ({"format": "date"}, {"format": "date-time"}, {"pattern": "^(?:" + "|".join(["ab"] * 1360) + ")$"})
    for keywords in names:
        schema = {"type": "object", "properties": {"s": {"type": "string", **keywords}}, "required": ["s"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert forced(schema) == tool_choice_schema([tool], "f", False, {"f"}).text


def test_a_pattern_that_only_a_library_refuses_is_left_out_without_strict():
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": "^C:\\\\[a-z]+$"}}}
    grammar = compiled(byte_backend("xgrammar"), "json_schema", forced(schema))
    assert takes(grammar, '[{"name":"f","parameters":{"s":"x"}}]')
    assert not takes(grammar, '[{"name":"f","parameters":{"s":1}}]')
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(GrammarError, match="only escaped"):
        byte_backend("xgrammar").compile("json_schema", tool_choice_schema([tool], "f", False, {"f"}).text)


@pytest.mark.parametrize("parameters", [{"properties": []}, {"properties": {"a": 3}}])
def test_parameters_that_are_no_schema_are_refused(parameters: dict):
    with pytest.raises(InvalidRequest, match="parameters of the tool 'f'"):
        forced(parameters)


@pytest.mark.parametrize("kind", ["boolean", ["string", "null"], "objct"])
def test_parameters_of_another_type_are_refused(kind: object):
    with pytest.raises(InvalidRequest, match=r"f: parameters\.type is"):
        forced({"type": kind})
