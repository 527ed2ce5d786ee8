"""What a schema becomes is bounded, and so is the work of it: no step multiplies what the user wrote without end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.grammar import schema_strings
from tokenspeed.grammar.budget import MAX_STEPS, Budget
from tokenspeed.grammar.format_patterns import SHORT_PATTERNS
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import MAX_SCHEMA_CHARS, MAX_WRITTEN_CHARS, rewrite_schema
from tokenspeed.grammar.loose_schema import rewrite_what_can_be
from tokenspeed.grammar.schema_size import SchemaSize
from tokenspeed.grammar.schema_strings import NARROW_STEPS, string_of
from tokenspeed.grammar.schema_values import unique_arrays
from tokenspeed.protocol.errors import InvalidRequest

UNIQUE = {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True}
VALUES = [f"{place:05}{'x' * 50}" for place in range(1000)]
LONG = {"abcdefghij": {"enum": VALUES}}
NAMES = [f"a{place}" for place in range(5000)]


def spellings(name: str) -> list[str]:
    """Pointers to one definition, each another text."""
    masks = range(2 ** len(name))
    return [
        "#/$defs/" + "".join(f"%{ord(char):02X}" if mask >> at & 1 else char for at, char in enumerate(name))
        for mask in masks
    ]


def tuple_of(items: list[Any], **definitions: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "$defs": definitions}


BOMBS: dict[str, dict[str, Any]] = {
    # 75 kB that became 103 MB, 64 arrays for each of a thousand references.
    "unique arrays": tuple_of([UNIQUE] * 1000, e={"enum": [char * 500 for char in "abcdef"]}),
    "unique arrays of short values": tuple_of([UNIQUE] * 1000, e={"enum": list("abcdef")}),
    "unique booleans": tuple_of([{"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}] * 1500),
    # 100 kB that became 295 MB.
    "required, open": {"type": "object", "additionalProperties": {"enum": VALUES}, "required": NAMES},
    "required, by pattern": {"type": "object", "patternProperties": {"^a": {"enum": VALUES}}, "required": NAMES},
    # 59 MB.
    "spellings of one pointer": tuple_of([{"$ref": each} for each in spellings("abcdefghij")], **LONG),
    "an enum beside anyOf": {"enum": VALUES, "anyOf": [{"minLength": place % 7} for place in range(1500)]},
    # 4 seconds of reading and narrowing one pattern.
    "a pattern beside anyOf": {
        "type": "string",
        "pattern": "^" + "(?:[a-z0-9_-]{1,5}|q)" * 100 + "$",
        "anyOf": [{"maxLength": 250}] * 3000,
    },
    "a pattern beside an enum": tuple_of(
        [{"$ref": "#/$defs/p", "maxLength": place} for place in range(9, 900)],
        p={"enum": ["abab"], "pattern": "^" + "(?:[a-z0-9_-]{1,5}|q)" * 100 + "$"},
    ),
    "formats with lengths": tuple_of([{"format": "email", "maxLength": 50 + place % 200} for place in range(2500)]),
    "dates": tuple_of([{"format": "date"}] * 3900),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_multiplies_itself_is_refused(name: str):
    schema = BOMBS[name]
    assert len(json.dumps(schema)) <= MAX_SCHEMA_CHARS
    with pytest.raises(InvalidRequest, match=r"comparisons|becomes longer than 262144 characters") as refused:
        rewrite_schema(schema, "x")
    assert "make it smaller" in refused.value.message


def test_arrays_are_charged_before_they_are_made():
    own, items = {"minItems": 0}, {"enum": [char * 400_000 for char in "abcdef"]}
    with pytest.raises(GrammarError, match=f"more than {MAX_STEPS} comparisons"):
        unique_arrays(own, items, "#", Budget())
    assert len(unique_arrays(own, {"enum": list("abcdef")}, "#", Budget())["anyOf"]) == 64


def test_narrowing_a_pattern_is_charged():
    budget = Budget(1000)
    for _ in range(5):
        string_of({"pattern": "^[a-z]{1,30}$", "maxLength": 9}, "#", budget)
    with pytest.raises(GrammarError, match="comparisons"):
        for _ in range(50):
            string_of({"pattern": "^[a-z]{1,30}$", "maxLength": 9}, "#", budget)


def test_trying_what_can_be_held_is_charged(monkeypatch: pytest.MonkeyPatch):
    """Of a tool without `strict` each string was tried anew, 1.3 s for one schema; lengths alone ask for nothing."""
    tried: list[str] = []
    narrow = schema_strings.within

    def counted(source: str, low: int, high: int | None) -> str | None:
        tried.append(source)
        return narrow(source, low, high)

    monkeypatch.setattr(schema_strings, "within", counted)
    mails = [{"type": "string", "format": "email", "maxLength": 50 + place % 200} for place in range(2000)]
    properties = {
        "a": {"type": "array", "prefixItems": mails},
        "b": {"type": "string", "maxLength": 3},
        "c": {"not": {}},
    }
    done = rewrite_what_can_be({"type": "object", "properties": {**properties, "d": {"not": {"type": "null"}}}}, "x")
    assert done["properties"]["b"] == {"type": "string", "maxLength": 3}
    assert done["properties"]["a"]["prefixItems"][0]["type"] == "string"
    assert len(tried) * NARROW_STEPS * len(SHORT_PATTERNS["email"]) <= 4 * MAX_STEPS


def test_usual_large_schemas_pass():
    words = {"type": "string", "enum": ["red", "green"]}
    groups = {
        f"g{place}": {"type": "object", "properties": {f"p{at}": words for at in range(30)}} for place in range(60)
    }
    assert rewrite_schema({"type": "object", "properties": groups}, "x")
    patterns = [
        {"type": "string", "pattern": f"^[a-z]{{1,3}}(-[0-9a-f_{place}]+)*$", "maxLength": 99} for place in range(400)
    ]
    assert rewrite_schema(tuple_of(patterns), "x")
    mails = {f"m{place}": {"format": "email", "maxLength": 100} for place in range(100)}
    assert rewrite_schema({"properties": mails}, "x")
    assert rewrite_schema(tuple_of([UNIQUE] * 20, e={"enum": list("abcdef")}), "x")


def test_sizes_are_those_of_the_text():
    shared = ["ä", 1.5, None, {"b\n": [True, -3]}]
    value = {"a": shared, "c": {"d": shared, "e": []}, "f": {}}
    size = SchemaSize(1000, "too long").of(value)
    assert len(json.dumps(value)) <= size <= len(json.dumps(value)) + 2 * 12
    with pytest.raises(GrammarError, match="too long"):
        SchemaSize(size - 1, "too long").of(value)
    grown: list[Any] = ["x"]
    for _ in range(60):
        grown = [grown, grown]  # 2^60 in writing
    with pytest.raises(GrammarError, match="too long"):
        SchemaSize(MAX_WRITTEN_CHARS, "too long").of(grown)
