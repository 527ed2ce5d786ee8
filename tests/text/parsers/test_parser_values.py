"""JSON ends where it ends, typed values become JSON, Python literals too."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenspeed.text.parsers.cursor import Cursor, Markers
from tokenspeed.text.parsers.interface import ParseContext, ToolSpec, parse_all
from tokenspeed.text.parsers.json_scan import JsonScan
from tokenspeed.text.parsers.model_json import json_object, read_json
from tokenspeed.text.parsers.pipeline import build_pipeline
from tokenspeed.text.parsers.python_literal import to_json
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats
from tokenspeed.text.parsers.typed_arguments import ANY, NOT_STRING, STRING, json_text, member_kinds

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(
    value=JSON, indent=st.sampled_from([None, 1]), ascii=st.booleans(), tail=st.sampled_from(["}", " x", ", 1", "<"])
)
def test_scan_ends_exactly_behind_the_value(value, indent, ascii, tail):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    whole = JsonScan()
    assert whole.advance(text + tail, 0) == len(text)
    assert whole.done
    by_chars = JsonScan()
    taken = sum(by_chars.advance(char, 0) for char in text)
    by_chars.end()
    assert (taken, by_chars.done) == (len(text), True)
    if isinstance(value, dict | list | str):
        cut = JsonScan()
        cut.advance(text[:-1], 0)
        cut.end()
        assert not cut.done


@pytest.mark.parametrize("text", ["{]", "[}", '{"a": \'', "[<", "}", "{(", "<"])
def test_scan_stops_at_what_json_has_not(text):
    scan = JsonScan()
    assert scan.advance(text, 0) == len(text) - 1
    assert scan.broken
    assert not scan.done


def test_a_marker_inside_another_is_refused():
    with pytest.raises(ValueError, match="part of another"):
        Markers("</a>", "\n</a>")


def test_held_is_the_longest_possible_beginning():
    assert Markers("<<a", "b").held("x<<", 0) == 2
    assert Markers("<<a", "b").held("<<", 1) == 1
    assert Markers("abc").held("abd", 0) == 0


@pytest.mark.parametrize(
    ("text", "kinds", "wanted"),
    [
        ("12", {"integer"}, 12),
        (" -5\n", {"integer"}, -5),
        ("007", {"integer"}, 7),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("1e3", {"number"}, 1000.0),
        (".5", {"number"}, 0.5),
        ("12345678901234567890123", {"number"}, 12345678901234567890123),
        ("nan", {"number"}, "nan"),
        ("Infinity", {"number"}, "Infinity"),
        ("True", {"boolean"}, True),
        ("FALSE", {"boolean"}, False),
        ("1", {"boolean"}, "1"),
        ("None", {"null", "integer"}, None),
        ("null", {"string", "null"}, None),
        ("None of it", {"string", "null"}, "None of it"),
        ("007", {"string", "integer"}, "007"),
        ("7", {"string", "integer"}, 7),
        ("{'a': True, 'b': [None]}", {"object"}, {"a": True, "b": [None]}),
        ('{"a": NaN}', {"object"}, '{"a": NaN}'),
        ('{"a": 1}', {"array"}, '{"a": 1}'),
        ("(1, 'x')", {"array"}, [1, "x"]),
        ("[1,", {"array"}, "[1,"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("__import__('os')", {"object", "array", "number"}, "__import__('os')"),
        ('"quoted"', {"string"}, '"quoted"'),
        ("ü", set(), "ü"),
    ],
)
def test_typed_value(text, kinds, wanted):
    got = json.loads(json_text(text, frozenset(kinds)))
    assert got == wanted
    assert type(got) is type(wanted)


@settings(max_examples=80, deadline=None)
@given(value=JSON)
def test_json_of_its_own_type_is_kept_to_the_letter(value):
    text = json.dumps(value)
    assert json_text(text, ANY if not isinstance(value, str) else STRING) == (
        text if not isinstance(value, str) else json.dumps(text, ensure_ascii=False)
    )


SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "u": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
        "enum": {"enum": [1, "x", None]},
        "const": {"const": True},
        "loop": {"$ref": "#/properties/loop"},
        "far": {"$ref": "http://elsewhere/x"},
        "none": {},
        "odd": True,
    },
    "$defs": {"n": {"type": "number"}},
}


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("s", {"string"}),
        ("u", {"integer", "null"}),
        ("any", {"string", "number"}),
        ("enum", {"integer", "string", "null"}),
        ("const", {"boolean"}),
        *((key, set()) for key in ("loop", "far", "none", "odd", "unknown")),
    ],
)
def test_kinds_of_a_schema(key, kinds):
    assert member_kinds(SCHEMA, key) == kinds


@pytest.mark.parametrize("schema", [None, {}, {"properties": []}])
def test_no_schema_says_nothing(schema):
    assert member_kinds(schema, "a") == set()


@settings(max_examples=100, deadline=None)
@given(value=JSON)
def test_python_literal_of_any_value(value):
    assert json.loads(to_json(repr(value)) or "!") == value


@settings(max_examples=100, deadline=None)
@given(text=TEXT, prefix=st.sampled_from(["", "\\", "\\x4", "\\u00e", '"', "'", "\\n"]))
def test_pythonic_string_reads_as_python_reads_it(text, prefix):
    literal = repr(prefix + text)
    parsed = parse_all(tool_formats()["pythonic"].make(ParseContext()), f"[f(a={literal})]")
    assert json.loads(parsed.calls[0].arguments) == {"a": ast.literal_eval(literal)}


def test_pythonic_surrogate_pair_is_one_character():
    parsed = parse_all(tool_formats()["pythonic"].make(ParseContext()), r"[f(a='\ud83d\ude00')]")
    assert json.loads(parsed.calls[0].arguments) == {"a": "😀"}
    assert parsed.calls[0].arguments.isascii()


@settings(max_examples=80, deadline=None)
@given(text=TEXT)
def test_qwen_coder_string_keeps_every_character(text):
    tools = (ToolSpec("f", {"properties": {"a": {"type": "string"}}}),)
    raw = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parsed = parse_all(tool_formats()["qwen_coder"].make(ParseContext(tools=tools)), raw)
    assert json.loads(parsed.calls[0].arguments) == {"a": text}


@settings(max_examples=30, deadline=None)
@given(arguments=st.dictionaries(TEXT, JSON, max_size=4), ascii=st.booleans())
@pytest.mark.parametrize("name", ["qwen", "json", "llama", "mistral", "kimik2", "deepseek", "deepseek31", "gpt-oss"])
def test_json_arguments_are_given_to_the_letter(name, arguments, ascii):
    text = json.dumps(arguments, ensure_ascii=ascii)
    assume("<|" not in text)  # harmony without token ids cannot tell a mark from its spelling
    outputs = {
        "qwen": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
        "json": '[{"name": "f", "arguments": %s}]',
        "llama": '{"name": "f", "parameters": %s}',
        "mistral": "[TOOL_CALLS]f[ARGS]%s",
        "kimik2": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
        "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>",
        "deepseek31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        "gpt-oss": "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
    }
    parsed = parse_all(tool_formats()[name].make(ParseContext()), outputs[name].replace("%s", text))
    assert [call.arguments for call in parsed.calls] == [text]
    assert parsed.content == ""


def test_not_string_reads_what_it_can():
    assert [json_text(text, NOT_STRING) for text in ("1", "true", "[1]", "x")] == ["1", "true", "[1]", '"x"']


def test_within_gives_the_same_for_every_split():
    """The limit counts characters of the text, not of a piece."""
    marks = Markers("=>")
    for length in (3, 4, 5):
        results = set()
        for size in (1, 2, 100):
            cursor = Cursor()
            steps = cursor.within(marks, 4)
            text, result = "x" * length + "=>tail" * 3, "waits"
            for at in range(0, len(text), size):
                cursor.add(text[at : at + size])
                try:
                    next(steps)
                except StopIteration as stop:
                    result = stop.value
                    break
            results.add(result)
        assert results == {("x" * length, "=>") if length <= 4 else None}


_DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
_P = '<｜DSML｜parameter name="a" string="true">{}</｜DSML｜parameter>\n'
_X = '<|open|>argument key="a" type="integer"<|sep|>{}<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        ("glm45_moe", "<tool_call>f\n" + "<arg_key>a</arg_key><arg_value>{}</arg_value>\n" * 2 + "</tool_call>"),
        ("deepseek32", _DSML + _P + _P + "</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>' + _X + _X + "<|close|>call<|sep|>"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("json", '{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}'),
        ("json", '{"name": "f", "arguments": {"a": 1}, "n\\u0061me": "g"}'),
    ],
)
def test_what_comes_twice_makes_a_call_malformed(name: str, text: str):
    """The bug: a parameter that came twice was written twice into the JSON of the arguments, and of two names or two
    arguments of one call the first was taken, where a JSON parser takes the last."""
    parser = tool_formats()[name].make(ParseContext(tools=(ToolSpec("f"), ToolSpec("g"))))
    parsed = parse_all(parser, text)
    assert parser.incomplete and [call.name for call in parsed.calls] == ["f"]
    assert parsed.calls[0].arguments.count('"a"') == 1


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


DEEP_CALLS = {
    "qwen": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "json": '{"name": "f", "arguments": %s}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "qwen_coder": "<tool_call><function=f><parameter=a>%s</parameter></function></tool_call>",
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": %s}}',
    "pythonic": "[f(a=%s)]",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("depth", [200, 1000, 100_000])
@pytest.mark.parametrize("name", sorted(DEEP_CALLS))
def test_deep_nesting_is_text_or_a_call_and_no_fault(name, depth):
    """A call with arguments [[[...1000 deep...]]] was a RecursionError, and so a 500: one decoder caught only
    ValueError."""
    tools = [ToolSpec("f", {"type": "object", "properties": {"a": {"type": ["array", "object"]}}})]
    for value in (_nested(depth), '{"a": ' * depth + "1" + "}" * depth, "-" * depth + "1", "(" * depth + ")" * depth):
        parser = build_pipeline(reasoning_formats()["passthrough"], tool_formats()[name], ParseContext(tools=tools))
        parsed = parse_all(parser, DEEP_CALLS[name] % value)
        assert parsed.content or parsed.calls


@pytest.mark.parametrize("depth", [129, 1000, 100_000])
def test_what_nests_too_deep_is_no_json(depth):
    """How deep Python's parser goes depends on who calls it; what one place could read, the next could not write."""
    with pytest.raises(ValueError, match="deeper than 128"):
        read_json(_nested(depth))
    assert json_object('{"a":' * depth + "1" + "}" * depth) is None
    assert read_json(_nested(128)) is not None
    assert read_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000
