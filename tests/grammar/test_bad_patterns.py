"""Patterns that are none, wherever a schema may hold one: refused by name, or left out of what need not be exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_support import BYTES, byte_backend, compiled, takes

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import GrammarError, GrammarOptions
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.patterns import MAX_GROUPS, check_pattern
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.grammar.tools import tool_choice_schema
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec

HALF = "half a character"
REFUSED = {
    "*.txt": r"repeats nothing with the \* at 0", "a++": r"repeats nothing with the \+ at 2", "^*": "repeats nothing",
    "a|?": r"repeats nothing with the \? at 2", "{1}": r"repeats nothing with the \{1\}", "a{2}{3}": "repeats nothing",
    "a{2,1}": "2 is above 1", "a{,3}": r"without a least number.* write \{0,3\}", r"\uD83D": rf"{HALF}, \\uD83D at 0",
    r"[\ud800-\udfff]": HALF, "\ud83d": HALF, "(" * 1500 + "a" + ")" * 1500: f"more than {MAX_GROUPS} deep",
    "[a": "without its", "\\": "single backslash", r"\bcat\b": r"holds \\b", "(a": "without its",
    "a{0,2000000000}": "2000000000 times", "a(?=b)": "look-ahead",
}  # fmt: skip
"""By the scan, in its words."""

UNKNOWN = (r"\p{L}", r"[\w-.]+", "[z-a]", r"\u{1F600}", r"\x4", r"\cA", r"\k<a>", r"[a-\d]")
"""Not by the scan: libraries differ in them."""


@pytest.mark.parametrize(("pattern", "why"), REFUSED.items(), ids=[pattern[:12] for pattern in REFUSED])
def test_what_the_scan_refuses_is_named_with_its_place(pattern: str, why: str):
    with pytest.raises(GrammarError, match=why):
        check_pattern(pattern)
    inner: tuple[tuple[Any, str], ...] = (
        ({"type": "string", "pattern": pattern}, "#/properties/v/pattern: "),
        # The bug: beside an enum no scan had seen it. It was a 500, or `\b` was read as a backspace.
        ({"enum": ["zz", "a", "cat"], "pattern": pattern}, "#/properties/v/pattern: "),
        ({"const": "a", "pattern": pattern}, "#/properties/v/pattern: "),
        ({"type": "object", "patternProperties": {pattern: {}}}, "#/properties/v/patternProperties/"),
    )
    for schema, place in inner:
        with pytest.raises(InvalidRequest, match=why) as raised:
            rewrite_schema({"type": "object", "properties": {"v": schema}}, "x")
        assert raised.value.message.startswith(place)


def test_groups_up_to_the_limit_are_served():
    pattern = "(" * MAX_GROUPS + "a" + ")" * MAX_GROUPS
    schema = {"type": "object", "properties": {"v": {"type": "string", "pattern": pattern}}, "required": ["v"]}
    (text,) = {forced(schema).text, forced(schema, {"f"}).text}
    grammar = compiled(byte_backend("xgrammar"), "json_schema", text)
    assert takes(grammar, call({"v": "a"})) and not takes(grammar, call({"v": "b"}))


@pytest.mark.parametrize("value", [1, None, ["a"]])
def test_a_pattern_beside_an_enum_is_a_string(value: Any):
    with pytest.raises(InvalidRequest, match=r"#/pattern: a regular expression is a string"):
        rewrite_schema({"enum": ["a"], "pattern": value}, "x")


def test_an_unknown_escape_beside_an_enum_is_named():
    with pytest.raises(InvalidRequest, match=r"^#/pattern: .*'\\\\p'"):
        rewrite_schema({"enum": [1], "pattern": r"\p{L}"}, "x")


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a{", "a{", "a"), ("a{1", "a{1", "a"), ("^{a}$", "{a}", "a"), (r"\ud83d\ude00", "😀", "😁"),
        (r"[\uD83D\uDE00-\uD83D\uDE0F]b", "😁b", "a"), (r"\\ud83d", r"\\ud83d", "a"), ("(a|b){2}?c", "abc", "ac"),
    ],
)  # fmt: skip
def test_text_that_looks_like_more_is_held(library: str, pattern: str, good: str, bad: str):
    """Braces that count nothing, and characters that are written as two halves."""
    if pattern != r"\\ud83d":  # xgrammar has no backslash in strings with a pattern
        schema = json.dumps(rewrite_schema({"type": "string", "pattern": pattern}, "x"))
        grammar = compiled(byte_backend(library), "json_schema", schema)
        assert takes(grammar, f'"{good}"') and not takes(grammar, f'"{bad}"')
    plain = compiled(byte_backend(library), "regex", check_pattern(pattern))
    assert takes(plain, good.replace(r"\\", "\\")) and not takes(plain, bad)
    values = [good.replace(r"\\", "\\"), bad]
    assert rewrite_schema({"enum": values, "pattern": pattern}, "x") == {"enum": values[:1]}


def forced(parameters: dict[str, Any], strict: set[str] | None = None) -> GrammarSpec:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return tool_choice_schema([tool], "f", parallel=False, strict=strict or set())


def call(arguments: Any) -> str:
    return '[{"name":"f","parameters":' + json.dumps(arguments, separators=(",", ":")) + "}]"


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("pattern", [*REFUSED, *UNKNOWN], ids=lambda pattern: pattern[:12])
def test_a_forced_tool_without_strict_leaves_it_out(library: str, pattern: str):
    """The bug: a 500, as what NamePattern says of a pattern was not caught."""
    for member in ({"type": "string", "pattern": pattern}, {"type": "string", "enum": ["q"], "pattern": pattern}):
        spec = forced({"type": "object", "properties": {"v": member, "n": {"type": "integer"}}, "required": ["v"]})
        grammar = compiled(byte_backend(library), "json_schema", spec.text)
        assert takes(grammar, call({"v": "q"})) and takes(grammar, call({"v": "q", "n": 1}))
        assert not takes(grammar, call({"v": 1})) and not takes(grammar, call({"v": "q", "n": "x"}))
    named = forced({"type": "object", "patternProperties": {pattern: {"type": "string"}}})
    assert takes(compiled(byte_backend(library), "json_schema", named.text), call({}))


NAMES = {"type": "object", "propertyNames": {"maxLength": 3}}
INNER = {"type": "object", "properties": {"n": {"type": "integer"}, "o": NAMES}, "required": ["n"]}


def test_what_only_the_library_refuses_is_left_out_without_strict():
    """The bug: llguidance has no propertyNames, and one tool with them made the whole request a 400."""
    made = GrammarCompiler("llguidance", lambda: BYTES, GrammarOptions(), timeout_s=10.0)
    try:
        spec = forced(INNER)
        grammar = made.submit(spec).result(60)
        assert made.compiled(spec) is grammar
        assert takes(grammar, call({"n": 1, "o": {"long name": 1}})) and takes(grammar, call({"n": 1}))
        assert not takes(grammar, call({"n": "x"})) and not takes(grammar, call({}))
        assert takes(made.submit(forced(NAMES)).result(60), call({"long name": 1}))
        with pytest.raises(GrammarError, match="propertyNames"):
            made.submit(forced(INNER, {"f"})).result(60)
        bad = GrammarSpec(kind="regex", text="(a", looser=("[", "b"))
        assert takes(made.submit(bad).result(60), "b")
        with pytest.raises(GrammarError, match=r'invalid regex "\(a"'):
            made.submit(GrammarSpec(kind="regex", text="(a", looser=("[z-a]",))).result(60)
    finally:
        made.close()


def test_what_the_library_takes_is_held_exactly():
    made = GrammarCompiler("xgrammar", lambda: BYTES, GrammarOptions(), timeout_s=10.0)
    try:
        grammar = made.submit(forced(INNER)).result(60)
        assert takes(grammar, call({"n": 1, "o": {"abc": 1}})) and not takes(grammar, call({"n": 1, "o": {"abcd": 1}}))
    finally:
        made.close()
    assert not forced(INNER, {"f"}).looser
