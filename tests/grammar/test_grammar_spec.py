"""Constraints in a user's words: refused by name where they are malformed, and what the offline API makes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_support import byte_backend, compiled, takes

from tokenspeed import LLM, SamplingParams
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.spec import KINDS, make_spec, one_of, pick
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarKind

GREEDY = SamplingParams(max_tokens=60, temperature=0.0)

AWKWARD: list[Any] = [
    None, 1, True, "", "[", "(?=a)", [], [1], {}, "{}", "9" * 5000, '{"a": NaN}', '{"minimum": Infinity}',
    {"format": 1}, {"format": {"type": "json_schema", "json_schema": {"not": {}}}}, {"structures": 1},
    {"structures": [1], "triggers": 1}, {"format": {"type": "regex", "pattern": "(a"}}, {"minimum": 10**400},
    "[" * 900 + "]" * 900, "\ud800", ["\ud800"], {"enum": ["\ud800"]}, {"pattern": "\ud800"},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_sent_is_taken_or_refused_by_name(kind: str) -> None:
    for value in AWKWARD:
        try:
            make_spec(kind, value, "field").text.encode()
        except InvalidRequest as error:
            assert error.param == "field"


def test_a_deep_structural_tag_is_refused() -> None:
    """It ended in a RecursionError, which was answered 500."""
    inside = '{"type": "any_text"}'
    for depth, words in ((60, "more than 48 deep"), (600, "more than 48 deep")):
        tag = '{"format":' + '{"type": "optional", "content":' * depth + inside + "}" * (depth + 1)
        with pytest.raises(InvalidRequest, match=words):
            make_spec("structural_tag", tag, "tag")


SEVENS = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}}}
FORMATS: list[tuple[Any, str]] = [
    # The bug: only formats of type json_schema were looked at, so this was taken and not held.
    ({"type": "qwen_xml_parameter", "json_schema": SEVENS}, "multipleOf"),
    ({"type": "json_schema", "style": "qwen_xml", "json_schema": SEVENS}, "multipleOf"),
    ({"type": "dispatch", "rules": [["<a>", {"type": "json_schema", "json_schema": SEVENS}]]}, "multipleOf"),
    ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"pattern": "(?=a)b"}}}}, "look-ahead"),
    ({"type": "json_schema", "json_schema": {}, "zzz": 1}, "format: a format of type json_schema has no key 'zzz'"),
    ({"type": "tag", "begin": "<a>", "content": {"type": "any_text", "exclude": []}, "end": ""}, "no key 'exclude'"),
    ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "text"}]}, "format/elements/1/type: 'text'"),
    ({"type": "sequence", "elements": [{"value": "a"}]}, "format/elements/0/type: None"),
    ({"type": "sequence", "elements": {"type": "any_text"}}, "format/elements: a list"),
    ({"type": "dispatch", "rules": [{"type": "any_text"}]}, "format/rules/0: a rule"),
    ({"type": "json_schema", "json_schema": {}, "style": "gemma"}, "style: 'gemma' cannot be used"),
    ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order: only false"),
    ({"type": "json_schema", "json_schema": {}, "excludes": [""]}, "excludes: a list of texts"),
    # The bug: everything holds an empty text, so all that was left was an empty answer.
    ({"type": "any_text", "excludes": [""]}, "format/excludes: a list of texts is expected, none of them empty"),
    ({"type": "any_text", "excludes": "a"}, "format/excludes: a list of texts"),
    ({"type": "dispatch", "rules": [["", {"type": "any_text"}]]}, "format/rules/0/0: the text that a rule is for"),
    ({"type": "json_schema", "json_schema": {}, "max_whitespace_cnt": -1}, "max_whitespace_cnt"),
    # The bug: for each character a worker walked the vocabulary, until its time was up after 30 s.
    ({"type": "any_text", "excludes": ["x" * 60_000]}, "has 60000 characters, the limit is 256"),
    ({"type": "any_text", "excludes": ["x"] * 33}, "holds 33 texts, the limit is 32"),
    ({"type": "json_schema", "json_schema": {}, "excludes": ["x" * 65]}, "has 65 characters, the limit is 64"),
    ({"type": "dispatch", "rules": [["a", {"type": "any_text"}]], "excludes": ["x" * 257]}, "the limit is 256"),
    ({"type": "sequence", "elements": [{"type": "any_text", "excludes": ["x" * 205]}] * 5}, "1025 characters"),
    ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "x" * 8193}, "the limit is 8192"),
    ({"type": "dispatch", "rules": [[f"{'x' * 90}{n}", {"type": "any_text"}] for n in range(100)]}, "limit is 8192"),
    ({"type": "repeat", "min": 1, "max": 10**18, "content": {"type": "any_text"}}, "the limit is 2147483647"),
    ({"type": "json_schema"}, "json_schema is missing"),
    ({"type": "regex", "pattern": 1}, "pattern: a regular expression"),
    ([], "format: a format is an object, not an array"),
]


@pytest.mark.parametrize(("form", "words"), FORMATS, ids=[words for _, words in FORMATS])
def test_what_a_structural_tag_asks_for_is_held_or_refused(form: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make_spec("structural_tag", {"format": form}, "tag")
    assert words in raised.value.message and raised.value.param == "tag"
    with pytest.raises(InvalidRequest, match="no key 'stuff'"):
        make_spec("structural_tag", {"format": {"type": "any_text"}, "stuff": 1}, "tag")


def test_what_hundreds_of_tools_need_is_within_the_limits() -> None:
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": "</tool_call>"}
    tags = [{**tag, "begin": f"<tool_call>tool_{n}"} for n in range(500)]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "excludes": ["</think>", "<|im_end|>"]}
    assert make_spec("structural_tag", {"format": form}, "tag").kind == "structural_tag"
    form = {"type": "dispatch", "rules": [[f"<function=tool_number_{n}>", {"type": "any_text"}] for n in range(250)]}
    assert make_spec("structural_tag", {"format": form}, "tag").kind == "structural_tag"


QWEN_XML: list[dict[str, Any]] = [{"type": "json_schema", "style": "qwen_xml"}, {"type": "qwen_xml_parameter"}]


@pytest.mark.parametrize("form", [{"type": "json_schema"}, *QWEN_XML], ids=str)
def test_white_space_of_json_in_a_structural_tag_has_an_end(form: dict[str, Any]) -> None:
    """A small model wrote line ends behind `</parameter>` up to max_tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spec = make_spec("structural_tag", {"format": {**form, "json_schema": schema}}, "tag")
    grammar = compiled(byte_backend("xgrammar"), spec.kind, spec.text)
    parts = ("<parameter=a>", "1", "</parameter>", "") if form in QWEN_XML else ("{", '"a"', ":", "1", "}")
    for place in range(1, len(parts)):
        for count in (0, 1, 16, 17, 40):
            text = "".join(parts[:place]) + "\n" * count + "".join(parts[place:])
            assert takes(grammar, text) == (count <= 16), (place, count)
    assert not takes(grammar, "".join(parts).replace("1", "x"))


@pytest.mark.parametrize("value", ['{"enum": [NaN]}', {"const": float("nan")}, {"enum": [float("-inf")]}])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    """Python reads and writes NaN as JSON; no output would ever be valid."""
    with pytest.raises(InvalidRequest):
        make_spec("json", value, "field")


def test_one_at_most() -> None:
    assert pick(one_of({}, "o")) is None
    assert pick(one_of({"json": None, "json_object": False}, "o")) is None
    with pytest.raises(InvalidRequest, match=r"o\.json and o\.regex both"):
        pick(one_of({"json": {}, "regex": "a"}, "o"))
    with pytest.raises(InvalidRequest, match=r"o\.xml cannot be used; there are json, regex"):
        one_of({"xml": 1}, "o")


@pytest.mark.timeout(300)
def test_the_offline_api_obeys(default_checkpoint: Checkpoint) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    with LLM(max_num_seqs=4, max_model_len=256, max_total_tokens=1024, device="cpu", seed=1) as llm:
        for result in llm.generate(["Once", "A number:"], GREEDY, structured_outputs={"json": schema}):
            assert json.loads(result.outputs[0].text)["n"] <= 99
        chat = [{"role": "user", "content": "Yes or no?"}]
        assert llm.chat(chat, GREEDY, structured_outputs={"choice": ["yes", "no"]})[0].outputs[0].text in ("yes", "no")
        pattern = llm.generate("Code:", GREEDY, structured_outputs={"regex": "[A-Z]{3}-[0-9]{2}"})[0].outputs[0].text
        assert re.fullmatch("[A-Z]{3}-[0-9]{2}", pattern)
        with pytest.raises(InvalidRequest, match="multipleOf"):
            llm.generate("x", GREEDY, structured_outputs={"json": {"multipleOf": 3}})
        with pytest.raises(InvalidRequest, match="not defined"):
            llm.generate(["x", "y"], GREEDY, structured_outputs={"grammar": "root ::= nothing"})
        assert llm.generate("x", GREEDY)[0].outputs[0].finish_reason in ("stop", "length")


MALFORMED: list[tuple[Any, str]] = [
    ({"type": 5}, "#/type must be a string or an array of strings; it is a number"),
    ({"properties": [1]}, "#/properties must be an object whose values are schemas; it is an array"),
    (
        {"properties": {"a": {"type": "array", "prefixItems": 1}}},
        "#/properties/a/prefixItems must be an array of schemas",
    ),
    ({"allOf": 1}, "#/allOf must be an array of schemas; it is a number"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": [{}]}}}, "#/$defs/a/type must be a string or an array of strings"),
    ({"oneOf": [{"required": 5}, {"type": "null"}]}, "#/oneOf/0/required must be an array of strings; it is a number"),
    ({"oneOf": [{"required": [[]]}, {"type": "null"}]}, "it is an array of something else"),
    ({"type": "object", "properties": None}, "it is null"),
    ({"type": "string", "format": []}, "#/format must be a string"),
    ({"items": None}, "#/items: a schema is an object or a boolean, not null"),
    ([], "an object, not an array"),
]


@pytest.mark.parametrize(("schema", "words"), MALFORMED, ids=[words for _, words in MALFORMED])
def test_a_malformed_schema_is_told_in_json_words(schema: Any, words: str) -> None:
    """Python's own words reached the client: 'int' object is not iterable."""
    with pytest.raises(InvalidRequest) as raised:
        make_spec("json", schema, "field")
    assert words in raised.value.message


_PYTHON_WORDS = re.compile(
    r"object (is not|has no|of type)|NoneType|unhashable|sequence element|codec|not supported between|has no len"
)


@pytest.mark.parametrize("wrong", [5, 1.5, "x", [], [1], {}, {"a": 1}, True, None, [None], [{}]], ids=repr)
def test_no_keyword_of_any_shape_is_told_in_pythons_words(wrong: Any) -> None:
    shapes: list[dict[str, Any]] = [{}, {"type": "object"}, {"type": "string"}, {"type": "array"}, {"type": "number"}]
    keys = [
        *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "enum", "const", "anyOf"),
        *("oneOf", "allOf", "$ref", "pattern", "format", "minLength", "minimum", "multipleOf", "minItems"),
        *("uniqueItems", "patternProperties", "propertyNames", "not"),
    ]
    for key in keys:
        for shape in shapes:
            for schema in ({**shape, key: wrong}, {"oneOf": [{**shape, key: wrong}, {"type": "null"}]}):
                try:
                    make_spec("json", schema, "field")
                except InvalidRequest as error:
                    assert not _PYTHON_WORDS.search(error.message), error.message


@pytest.mark.parametrize(("kind", "text"), [("ebnf", 'root ::= "\ud800"'), ("regex", "[\ud800]")])
def test_half_a_character_in_a_grammar_is_told_in_plain_words(kind: GrammarKind, text: str) -> None:
    """It was Python's: 'utf-8' codec can't encode character '\\ud800' in position 10."""
    with pytest.raises(GrammarError, match="half a character"):
        byte_backend("xgrammar").compile(kind, text)


def test_property_names_may_be_a_boolean() -> None:
    """true, which asks for nothing, was malformed."""
    assert "propertyNames" not in make_spec("json", {"type": "object", "propertyNames": True}, "field").text
    with pytest.raises(InvalidRequest, match="propertyNames: only"):
        make_spec("json", {"type": "object", "propertyNames": False}, "field")
