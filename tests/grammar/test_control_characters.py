"""No string of JSON holds a raw control character, whatever limits it: xgrammar's own classes would let them in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import xgrammar
from grammar_support import CASES, byte_backend, compiled, takes

from tokenspeed.grammar import xgrammar_backend
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.schema_types import FORMATS
from tokenspeed.grammar.select import BACKENDS

LENGTHS: list[dict[str, Any]] = [{"maxLength": most} for most in range(4)] + [{"minLength": least} for least in (1, 2)]
LENGTHS += [{"minLength": least, "maxLength": most} for least in (1, 2) for most in range(least, 4)]
PATTERNS = (".", ".*", "a.b", "[^a]", "[^a]{2,3}", r"\S", r"\W+", r"\D", r"[^\d]", r"[\s\S]", '[^"\\\\\\r\\n]')
STRINGS = [{"type": "string", **keywords} for keywords in LENGTHS]
STRINGS += [{"type": "string", "pattern": pattern} for pattern in PATTERNS]
STRINGS += [{"type": "string", "format": name} for name in sorted(FORMATS)]
_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')


def schemas() -> Iterator[Any]:
    yield from (case.schema for case in CASES if not case.refused)
    for string in STRINGS:
        yield string
        yield {"type": "array", "items": string}
        yield {"type": "object", "properties": {"a": string, "b": string}, "required": ["a"]}
        yield {"type": "object", "additionalProperties": string}
        yield {"type": "object", "patternProperties": {"^x": string}}
        yield {"type": "object", "propertyNames": {key: string[key] for key in string if key != "format"}}


def classes_with_controls(grammar: str) -> set[str]:
    """Classes of a grammar in the library's notation, white space apart, that hold a character below 0x20."""
    found = {part for part in _PART.findall(grammar) if part[0] == "["} - {r"[ \n\r\t]"}
    return {part for part in found if any(re.fullmatch(part, chr(code)) for code in range(32))}


def test_no_class_of_a_grammar_holds_control_characters():
    """The bug: where one character is the most, the library writes the class into the rule of the string, which the
    mending did not know, so a tab stood raw in it."""
    assert classes_with_controls(r'root ::= (("\"" [^\"\\\r\n] "\"") | ("[^a]" [ \n\r\t]))') == {r"[^\"\\\r\n]"}
    num_looked_at = 0
    for schema in schemas():
        text = json.dumps(rewrite_schema(schema, "x"))
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": json.loads(text)}}
        for grammar in (
            xgrammar.Grammar.from_json_schema(text, any_whitespace=True, max_whitespace_cnt=16),
            xgrammar.Grammar.from_structural_tag(json.dumps(tag)),
        ):
            written = xgrammar_backend._mended(grammar) or str(grammar)
            assert not classes_with_controls(written), schema
            num_looked_at += 1
    assert num_looked_at > 300


ONE = [{"minLength": 1, "maxLength": 1}, {"maxLength": 1}]


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("lengths", ONE, ids=str)
def test_strings_of_one_character_at_most(library: str, lengths: dict[str, Any]):
    string = {"type": "string", **lengths}
    text = json.dumps(rewrite_schema(string, "x"))
    form: dict[str, Any] = {"type": "json_schema", "json_schema": json.loads(text)}
    grammars = [compiled(byte_backend(library), "json_schema", text)]
    if library == "xgrammar":
        for each in (form, {**form, "excludes": ["</x"]}):
            tag = json.dumps({"type": "structural_tag", "format": each})
            grammars.append(compiled(byte_backend(library), "structural_tag", tag))
    for grammar in grammars:
        assert not [code for code in range(32) if takes(grammar, f'"{chr(code)}"')]
        assert takes(grammar, '"a"') and takes(grammar, '"ü"') and not takes(grammar, '"ab"')
        assert takes(grammar, '""') == ("minLength" not in lengths)
    if library == "xgrammar":
        names = json.dumps(rewrite_schema({"type": "object", "propertyNames": lengths}, "x"))
        grammar = compiled(byte_backend(library), "json_schema", names)
        assert not [code for code in range(32) if takes(grammar, f'{{"{chr(code)}":1}}')]
        assert takes(grammar, '{"a":1}') and not takes(grammar, '{"ab":1}')


def test_a_pattern_outside_of_json_is_left_as_it_is():
    """In a structural tag without strings of limited length the class can only be the user's own."""
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": r'[^"\\\r\n]'}}
    assert takes(compiled(byte_backend("xgrammar"), "structural_tag", json.dumps(tag)), "\t")
