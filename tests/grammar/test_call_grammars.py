"""Calls that a model writes in its own format: what the grammar lets through is what the format's parser reads."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
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
        section, parameters = marks.section or (), () if marks.parameters is None else (marks.parameters.end,)
        spelled = (*section, marks.begin("f"), marks.behind_number or "", ids, marks.before_arguments, *parameters)
        self.specials = sorted(set(re.findall(r"<[^<>\" ]*>|\[[A-Z_]*\]", "".join(spelled) + marks.end)))
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
    numbered = "" if marks.behind_number is None else f"{number}{marks.behind_number}"
    if marks.parameters is not None:
        return marks.begin(name) + numbered + tagged(marks.parameters, arguments) + marks.end
    return marks.begin(name) + numbered + marks.before_arguments + arguments + marks.end


def kind_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def around(marks: CallMarks) -> tuple[str, str]:
    return marks.section or ("", "")


def tagged(marks: ParameterMarks, arguments: str) -> str:
    """JSON arguments in tags, strings raw."""
    line = "\n" if marks.line else ""
    before, behinds = marks.begin
    parts = [
        before
        + key
        + (behinds[0] if marks.by_type is None else marks.by_type[kind_of(value)][0])
        + line
        + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
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
    begin, end = around(marks)
    calls = begin + good + marks.separator + call(marks, "g", '{"b": "y"}', 12) + end
    assert model.takes(grammar, 'No call, but <b>, {"name": "f"} and [1].')
    assert model.takes(grammar, f"<think>Hm</think> I look. {calls}")
    assert not model.takes(grammar, call(marks, "f.x-1", '{"a": "x"}'))
    assert not model.takes(grammar, call(marks, "f.x-1", "{}"))
    assert not model.takes(grammar, call(marks, "h", "{}"))
    assert not model.takes(grammar, good.removesuffix(marks.end or "}"))
    parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), f"I look. {calls}")
    if form.names[0] == "kimi_k3":
        return  # its calls stand in a channel of their own: test_a_channel_of_calls
    assert [(one.name, one.arguments) for one in parsed.calls] == [("f.x-1", '{"a": 1}'), ("g", '{"b": "y"}')]
    assert parsed.content.strip() == "I look."


@pytest.mark.parametrize(("form", "marks"), [one for one in FORMATS if one.values[1].section is not None])
def test_an_answer_or_calls(form: ToolFormat, marks: CallMarks):
    """`response_format` beside tools was refused, although agents send both."""
    model = Model(marks)
    first, second = call(marks, "f.x-1", '{"a": 1}'), call(marks, "g", "{}", 1)
    begin, end = around(marks)
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


def read(form: ToolFormat, tools: list[dict[str, Any]], text: str) -> Any:
    """The arguments of the one call of a text."""
    channel = "<|open|>tools<|sep|>" if form.names[0] == "kimi_k3" else ""
    (parsed,) = parse_all(form.make(ParseContext(tools=tool_specs(tools))), channel + text).calls
    return json.loads(parsed.arguments)


def one_tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(("form", "marks"), TAGGED)
def test_parameters_in_tags_obey_their_schemas(form: ToolFormat, marks: CallMarks):
    """The bug: `strict` had no effect in the formats whose parameters have tags of their own."""
    tools = one_tool(MANY)
    model = Model(marks)
    grammar = model.compiled(strict_calls(tools, {"f"}, marks))
    for good in (FULL, {"text": "", "count": 10}, FULL | {"maybe": "x", "pick": "c"}):
        text = call(marks, "f", json.dumps(good))
        assert model.takes(grammar, "So: " + text)
        assert read(form, tools, text) == good
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
        FULL | {"long": "ab"},
        FULL | {"long": ""},
    ]
    for bad in bads:
        assert not model.takes(grammar, call(marks, "f", json.dumps(bad))), bad
    assert marks.parameters is not None
    assert model.takes(grammar, call(marks, "f", json.dumps({"text": "x", "count": 2, "tags": ["a<b>", "</"]})))
    closing = {"text": "x", "count": 2, "tags": [f"x{marks.parameters.end}"]}
    assert not model.takes(grammar, call(marks, "f", json.dumps(closing))), "it would end the value"
    for banned in marks.banned:
        assert not model.takes(grammar, f"So: {banned}")


STRINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"pattern": "^[a-c]{2}$"}, ["ab"], ["", "abc", "ad", "a"]),
    ({"pattern": "^\\d{2}\\.\\S+$"}, ['12.x"y'], ["12.", "1.x", "12.x y"]),
    ({"pattern": "^.{2,3}$"}, ["ab", 'é\\"'], ["a", "abcd", "a\n"]),
    ({"pattern": "^[^x]+$"}, ["ab\ny"], ["", "ax"]),
    ({"pattern": "^[!-~]+[\\s\\S]$"}, ["a=b!\n", ">x"], ["", "é"]),
    ({"pattern": "^a<b>$"}, ["a<b>"], ["a"]),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "x", ""]),
    ({"format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29", "2024-02-29T10:00:00"]),
    ({"format": "time"}, ["10:00:00.5+02:00"], ["24:00:00Z", "10:00"]),
    ({"format": "duration"}, ["P3Y6M4DT12H30M5S", "PT36H", "P2W"], ["P", "PT", "3D", "P1D2H"]),
    ({"format": "email"}, ["a.b+c@example.org"], ["a", "a@", "a b@x"]),
    ({"format": "hostname"}, ["a-b.example"], ["-a", "a..b", "a_b"]),
    ({"format": "ipv4"}, ["1.2.3.255"], ["1.2.3", "1.2.3.256"]),
    ({"format": "ipv6"}, ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1", "1::2::3", "1:2:3:4:5:6:7:8:9"]),
    ({"format": "uri"}, ["https://a.example:8/b?c=d/#e", "urn:x:y", "mailto:a@b"], ["a", "/b", "http://a b", "x:<"]),
    ({"format": "uri-reference"}, ["/b?c", "../x", "#e", "", "https://a/"], ["a b", "<"]),
    ({"format": "uri-template"}, ["/a{/b,c*}{?d:3}", "x"], ["{", "a b", "{}"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
    ({"format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
    ({"format": "relative-json-pointer"}, ["0#", "1/a"], ["/a", "01"]),
    ({"minLength": 1}, ["a", "ab <b>\n\n"], [""]),
    ({"minLength": 2}, ["ab", "a\n"], ["a"]),
    ({"maxLength": 3}, ["", "a", "é\n"], ["abcd"]),
    ({"minLength": 1, "maxLength": 2}, ["a", "\n"], ["", "abc"]),
    ({"minLength": 2, "maxLength": 2}, ["ab", "\n\n"], ["a", "abc", "a\n\n"]),
    ({"maxLength": 0}, [""], ["a"]),
]


@pytest.mark.parametrize(("form", "marks"), TAGGED)
@pytest.mark.parametrize(("keywords", "good", "bad"), STRINGS, ids=[json.dumps(one[0]) for one in STRINGS])
def test_strings_in_tags_are_held(form: ToolFormat, marks: CallMarks, keywords: Any, good: list[str], bad: list[str]):
    """The bug: what `pattern`, `format` and lengths say of a string between tags was taken and ignored."""
    tools = one_tool({"type": "object", "properties": {"s": {"type": "string", **keywords}}, "required": ["s"]})
    model = Model(marks)
    grammar = model.compiled(strict_calls(tools, {"f"}, marks))
    for value in good:
        text = call(marks, "f", json.dumps({"s": value}))
        assert model.takes(grammar, text), value
        assert read(form, tools, text) == {"s": value}
    for value in bad:
        assert not model.takes(grammar, call(marks, "f", json.dumps({"s": value}))), value
    if "pattern" in keywords or "format" in keywords:
        jsonschema.validate(good[0], tools[0]["function"]["parameters"]["properties"]["s"])
    assert marks.parameters is not None
    for stop in marks.parameters.stops:
        assert not model.takes(grammar, call(marks, "f", json.dumps({"s": f"x{stop}"})))


@pytest.mark.parametrize(("form", "marks"), TAGGED)
@pytest.mark.parametrize(
    "item", [{"pattern": "^.*$"}, {"maxLength": 60}, {"minLength": 2}, {"format": "json-pointer"}, {}], ids=str
)
def test_no_string_inside_of_json_ends_a_parameter(form: ToolFormat, marks: CallMarks, item: dict[str, Any]):
    """The bug: a string of limited length, or with a pattern, could hold the closing tag."""
    tools = one_tool({"type": "object", "properties": {"l": {"type": "array", "items": {"type": "string", **item}}}})
    model = Model(marks)
    grammar = model.compiled(strict_calls(tools, {"f"}, marks))
    assert model.takes(grammar, call(marks, "f", '{"l": ["/ab", "/a"]}'))
    assert marks.parameters is not None
    for stop in marks.parameters.stops:
        assert not model.takes(grammar, call(marks, "f", json.dumps({"l": [f"/ab{stop}"]})))
    if item.keys() & {"minLength", "maxLength"}:
        assert not model.takes(grammar, call(marks, "f", json.dumps({"l": ["a" * (61 if "maxLength" in item else 1)]})))


UNIONS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": ["string", "integer"], "pattern": "^[0-9]a$"}, ["1a", 12], ["a"]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a", ["a"]], [[1], "[1]"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["a", "", 3], [2, "2"]),
    ({"enum": ["auto", 1, None]}, ["auto", 1, None], ["x", 2]),
    ({"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/o"}]}, [True, {"k": 1}], [{"k": "x"}, "x"]),
]


@pytest.mark.parametrize(("form", "marks"), TAGGED)
@pytest.mark.parametrize(("schema", "good", "bad"), UNIONS, ids=[json.dumps(one[0]) for one in UNIONS])
def test_values_of_several_types_in_tags(form: ToolFormat, marks: CallMarks, schema: Any, good: Any, bad: Any):
    """Where no tag says the type, a text must not be readable as another type that the schema does not allow so."""
    definitions = {"o": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}}
    tools = one_tool({"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": definitions})
    model = Model(marks)
    grammar = model.compiled(strict_calls(tools, {"f"}, marks))
    for value in good:
        text = call(marks, "f", json.dumps({"v": value}))
        assert model.takes(grammar, text), value
        assert read(form, tools, text) == {"v": value}
    for value in bad:
        text = call(marks, "f", json.dumps({"v": value}))
        if model.takes(grammar, text):  # then it is read as another value, which the schema allows
            jsonschema.validate(read(form, tools, text)["v"], {**schema, "$defs": definitions})


MORE_THAN_A_LIST: dict[str, Any] = {
    "additionalProperties": {"additionalProperties": {"type": "integer"}},
    "minProperties": {"properties": {"a": {"type": "integer"}}, "minProperties": 1},
    "anyOf": {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
    "name": {"properties": {"a b": {"type": "integer"}}},
}


@pytest.mark.parametrize(("form", "marks"), TAGGED)
@pytest.mark.parametrize("said", MORE_THAN_A_LIST)
def test_arguments_that_are_more_than_a_list(form: ToolFormat, marks: CallMarks, said: str):
    """The bug: they were free, although `strict` was set. Now one JSON object holds them, or the request is refused."""
    tools = one_tool({"type": "object", **MORE_THAN_A_LIST[said]})
    assert marks.parameters is not None
    if marks.parameters.whole is None and said != "anyOf":
        with pytest.raises(InvalidRequest, match=r"'f'.*tool_choice") as refusal:
            strict_calls(tools, {"f"}, marks)
        assert refusal.value.param == "tools"
    else:
        model = Model(marks)
        grammar = model.compiled(strict_calls(tools, {"f"}, marks))
        key = next(iter(MORE_THAN_A_LIST[said].get("properties", {"a": 1})))
        number = "" if marks.behind_number is None else f"1{marks.behind_number}"
        before, behind = marks.parameters.whole or ("", "")
        texts = [
            marks.begin("f") + number + before + json.dumps({key: value}) + behind + marks.end for value in (1, "x")
        ]
        if marks.parameters.whole is None or said == "anyOf":
            texts = [call(marks, "f", json.dumps({key: value})) for value in (1, "x")]
        assert model.takes(grammar, texts[0]) and not model.takes(grammar, texts[1])
        assert read(form, tools, texts[0]) == {key: 1}
    free = Model(marks)
    grammar = free.compiled(strict_calls(tools, set(), marks))
    assert free.takes(grammar, call(marks, "f", '{"a": 1, "b-c.d": "x"}')) and free.takes(
        grammar, call(marks, "f", "{}")
    )
    assert not free.takes(grammar, call(marks, "f", '{"a": 1}').removesuffix(marks.end))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(<|/|p|a|r|m|e|t|>|_|v|l|u|g)+$"},
        {"type": ["string", "integer"], "minimum": 3, "minLength": 2},
    ],
)
def test_strings_that_cannot_be_held_are_refused(schema: Any):
    """A pattern that asks for every character of the closing tag; a bounded string that would be read as a number."""
    tools = one_tool({"type": "object", "properties": {"s": schema}})
    for name in ("qwen_coder", "glm45_moe"):
        marks = tool_formats()[name].marks
        assert marks is not None
        with pytest.raises(InvalidRequest, match=r"tool 'f'.*#/properties/s") as refusal:
            strict_calls(tools, {"f"}, marks)
        assert refusal.value.param == "tools"


def test_a_channel_of_calls():
    """Kimi K3: what its grammar takes in the channel `tools` is read as calls; a space in a bracket changes nothing."""
    form = tool_formats()["kimi_k3"]
    assert form.marks is not None
    model = Model(form.marks)
    grammar = model.compiled(strict_calls(TOOLS, {"f.x-1"}, form.marks))
    both = call(form.marks, "f.x-1", '{"a": 1}', 1) + call(form.marks, "g", '{"b": "y"}', 2)
    text = f"<|close|>response<|sep|><|open|>tools<|sep|>{both}<|close|>tools<|sep|><|close|>message<|sep|>"
    assert model.takes(grammar, text)
    parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), text)
    assert [(one.name, one.arguments) for one in parsed.calls] == [("f.x-1", '{"a": 1}'), ("g", '{"b": "y"}')]
    assert not model.takes(grammar, text.replace("<|open|>call", "<|open|> call"))
    assert not model.takes(grammar, text.replace('tool="f.x-1" index="1"', 'index="1" tool="f.x-1"'))


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
