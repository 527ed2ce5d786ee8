"""Calls that a model writes in its own format: what the grammar lets through is what the format's parser reads."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tokenspeed.grammar.interface import CompiledGrammar, GrammarOptions, Vocabulary
from tokenspeed.grammar.select import open_backend
from tokenspeed.grammar.spec import make_spec
from tokenspeed.grammar.tools import answer_or_calls, strict_calls, tool_choice_schema
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.text.parsers.interface import CallMarks, ParameterMarks, ParseContext, ToolFormat, parse_all, tool_specs
from tokenspeed.text.parsers.registry import tool_formats

EOS = 256
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f.x-1", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
FORMATS = [
    pytest.param(one, one.marks, id=name)
    for name, one in tool_formats().items()
    if one.marks is not None and name == one.names[0]
]


class Model:
    """A vocabulary of bytes and of one format's special tokens."""

    def __init__(self, marks: CallMarks) -> None:
        ids = "" if marks.own_id is None else marks.own_id[0]
        spelled = "".join((*marks.section, marks.begin("f"), marks.behind_number or "", ids, marks.before_arguments))
        self.specials = sorted(set(re.findall(r"<[^<>]*>|\[[A-Z_]*\]", spelled + marks.end)))
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *(mark.encode() for mark in self.specials)]
        special_ids = tuple(range(257, len(self.tokens)))
        vocabulary = Vocabulary(tokens=self.tokens, special_ids=special_ids, eos_token_ids=(EOS,))
        self.backend = open_backend("xgrammar", vocabulary, GrammarOptions())
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        return self.backend.load(self.backend.compile(spec.kind, spec.text))

    def takes(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether an output may be exactly this text."""
        matcher = grammar.matcher()
        for piece in self._pattern.split(text):
            ids = [257 + self.specials.index(piece)] if piece in self.specials else list(piece.encode())
            if not all(matcher.accept(token_id) for token_id in ids):
                return False
        row = np.zeros(-(-len(self.tokens) // 32), dtype=np.int32)
        return not matcher.fill(row) or bool(row.view(np.uint32)[EOS // 32] >> EOS % 32 & 1)


def call(marks: CallMarks, name: str, arguments: str, number: int = 0) -> str:
    if marks.parameters is not None:
        return marks.begin(name) + tagged(marks.parameters, arguments) + marks.end
    numbered = "" if marks.behind_number is None else f"{number}{marks.behind_number}"
    return marks.begin(name) + numbered + marks.before_arguments + arguments + marks.end


def tagged(marks: ParameterMarks, arguments: str) -> str:
    """JSON arguments in tags, strings raw."""
    line = "\n" if marks.line else ""
    before, (behind, *_) = marks.begin
    parts = [
        before
        + key
        + behind
        + line
        + (value if isinstance(value, str) else json.dumps(value))
        + line
        + marks.end
        + "\n"
        for key, value in json.loads(arguments).items()
    ]
    return "\n" + "".join(parts)


@pytest.mark.parametrize(("form", "marks"), FORMATS)
def test_strict_calls_among_free_text(form: ToolFormat, marks: CallMarks):
    """The bug: `strict: true` had no effect where the model decides about calls."""
    model = Model(marks)
    grammar = model.compiled(strict_calls(TOOLS, {"f.x-1"}, marks))
    good = call(marks, "f.x-1", '{"a": 1}')
    calls = marks.section[0] + good + marks.separator + call(marks, "g", '{"b": "y"}', 12) + marks.section[1]
    assert model.takes(grammar, 'No call, but <b>, {"name": "f"} and [1].')
    assert model.takes(grammar, f"<think>Hm</think> I look. {calls}")
    assert not model.takes(grammar, call(marks, "f.x-1", '{"a": "x"}'))
    assert not model.takes(grammar, call(marks, "f.x-1", "{}"))
    assert not model.takes(grammar, call(marks, "h", "{}"))
    assert not model.takes(grammar, good.removesuffix(marks.end or "}"))
    parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), f"I look. {calls}")
    assert [(one.name, one.arguments) for one in parsed.calls] == [("f.x-1", '{"a": 1}'), ("g", '{"b": "y"}')]
    assert parsed.content.strip() == "I look."


@pytest.mark.parametrize(("form", "marks"), FORMATS)
def test_an_answer_or_calls(form: ToolFormat, marks: CallMarks):
    """`response_format` beside tools was refused, although agents send both."""
    model = Model(marks)
    first, second = call(marks, "f.x-1", '{"a": 1}'), call(marks, "g", "{}", 1)
    begin, end = marks.section
    answers = {
        "json": ({"type": "integer"}, "12", '"x"'),
        "regex": ("ab+", "abb", "c"),
        "grammar": ('root ::= "yes"', "yes", "no"),
    }
    for kind, (value, good, bad) in answers.items():
        spec = answer_or_calls(make_spec(kind, value, "response_format"), TOOLS, {"f.x-1"}, marks, True)
        assert spec is not None and spec.param == "response_format"
        grammar = model.compiled(spec)
        assert model.takes(grammar, good) and not model.takes(grammar, bad)
        assert model.takes(grammar, begin + first + marks.separator + second + end)
        assert not model.takes(grammar, good + begin + first + end)
        assert not model.takes(grammar, begin + end)
        assert not model.takes(grammar, begin + call(marks, "f.x-1", "{}") + end)
    one = answer_or_calls(make_spec("regex", "ab+", "regex"), TOOLS, set(), marks, False)
    assert one is not None
    grammar = model.compiled(one)
    assert model.takes(grammar, begin + first + end)
    assert not model.takes(grammar, begin + first + marks.separator + second + end)
    parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), begin + first + end)
    assert [found.name for found in parsed.calls] == ["f.x-1"] and not parsed.content


TAGGED = [one for one in FORMATS if one.values[1].parameters is not None]
MANY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "pick": {"type": "string", "enum": ["a b", "c"]},
        "count": {"type": "integer", "minimum": 2},
        "on": {"type": "boolean"},
        "tree": {"$ref": "#/$defs/tree"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "maybe": {"type": ["string", "null"]},
        "long": {"type": "string", "minLength": 3},
        "any": {},
    },
    "required": ["text", "count"],
    "$defs": {"tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
}
FULL = {
    "text": 'Zürich "<b>" { \n\n </parameter',
    "pick": "a b",
    "count": 2,
    "on": True,
    "tree": {"kids": [{"kids": []}]},
    "maybe": None,
    "long": "abc",
    "any": "y",
}


@pytest.mark.parametrize(("form", "marks"), TAGGED)
def test_parameters_in_tags_obey_their_schemas(form: ToolFormat, marks: CallMarks):
    """The bug: `strict` had no effect in the formats whose parameters have tags of their own."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": MANY}}]
    model = Model(marks)
    grammar = model.compiled(strict_calls(tools, {"f"}, marks))
    parser_tools = ParseContext(tools=tool_specs(tools))
    for good in (FULL, {"text": "", "count": 10}, FULL | {"maybe": "x", "pick": "c"}):
        text = call(marks, "f", json.dumps(good))
        assert model.takes(grammar, "So: " + text)
        (parsed,) = parse_all(form.make(parser_tools), text).calls
        assert json.loads(parsed.arguments) == good
    bads: list[dict[str, Any]] = [
        {"text": "x"},
        {"count": 2, "text": "in another order"},
        FULL | {"pick": "d"},
        FULL | {"count": 1},
        FULL | {"count": "two"},
        FULL | {"on": "True"},
        FULL | {"tree": {"leaf": 1}},
        FULL | {"tree": "x"},
        FULL | {"more": "x"},
    ]
    for bad in bads:
        assert not model.takes(grammar, call(marks, "f", json.dumps(bad))), bad
    assert marks.parameters is not None
    assert model.takes(grammar, call(marks, "f", json.dumps({"text": "x", "count": 2, "tags": ["a<b>", "</"]})))
    closing = {"text": "x", "count": 2, "tags": [f"x{marks.parameters.end}"]}
    assert not model.takes(grammar, call(marks, "f", json.dumps(closing))), "it would end the value"
    for banned in marks.banned:
        assert not model.takes(grammar, f"So: {banned}")


@pytest.mark.parametrize(("form", "marks"), TAGGED)
def test_parameters_that_are_more_than_a_list_are_free(form: ToolFormat, marks: CallMarks):
    free = {"type": "object", "additionalProperties": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": free}}]
    model = Model(marks)
    for strict in (set(), {"f"}):
        grammar = model.compiled(strict_calls(tools, strict, marks))
        assert model.takes(grammar, call(marks, "f", '{"a": 1, "b-c.d": "x"}')) and model.takes(
            grammar, call(marks, "f", "{}")
        )
        assert not model.takes(grammar, call(marks, "f", '{"a": 1}').removesuffix(marks.end))


def test_mistrals_ids_and_lists():
    """Tokenizers before v11 write one array of calls, later ones may write an id."""
    form = tool_formats()["mistral"]
    assert form.marks is not None
    model = Model(form.marks)
    both = '[TOOL_CALLS] [{"name": "f.x-1", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]'
    one = '[TOOL_CALLS][{"name": "f.x-1", "arguments": {"a": 1}}]'
    named = '[TOOL_CALLS]f.x-1[CALL_ID]abcDEF123[ARGS]{"a": 1}'
    free = model.compiled(strict_calls(TOOLS, {"f.x-1"}, form.marks))
    integer = make_spec("json", {"type": "integer"}, "response_format")
    for parallel in (True, False):
        spec = answer_or_calls(integer, TOOLS, {"f.x-1"}, form.marks, parallel)
        assert spec is not None
        grammar = model.compiled(spec)
        for text in (one, named, *([both] if parallel else [])):
            assert model.takes(grammar, text) and model.takes(free, "So: " + text)
            bad = text.replace('"a": 1', '"a": "x"')
            assert not model.takes(grammar, bad) and not model.takes(free, bad)
            parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), text)
            assert (parsed.calls[0].name, parsed.calls[0].arguments) == ("f.x-1", '{"a": 1}') and not parsed.content
        assert parallel or not model.takes(grammar, both)
        assert not model.takes(grammar, "[TOOL_CALLS][]")


def test_many_tools_with_strings_of_limited_length():
    """The bug: what took 0.3 s to compile was written down for the engine, which took minutes: a 400 for its time."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 20} for i in range(8)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(48)]
    marks = next(iter(FORMATS)).values[1]
    compiled = Model(marks).backend.compile("json_schema", tool_choice_schema(tools, None, True).text)
    assert len(compiled) < 1 << 20


def test_structural_tags_are_no_alternative_and_bad_schemas_are_named():
    marks = next(iter(FORMATS)).values[1]
    tag = make_spec("structural_tag", {"format": {"type": "any_text"}}, "response_format")
    assert answer_or_calls(tag, TOOLS, set(), marks, True) is None
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {"const": 1}}}}}}]
    with pytest.raises(InvalidRequest, match="parameters of the tool 'f'"):
        strict_calls(bad, {"f"}, marks)
    assert json.loads(strict_calls(bad, set(), marks).text)["format"]["type"] == "triggered_tags"
