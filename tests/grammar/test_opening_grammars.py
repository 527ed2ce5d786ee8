"""Formats in which only the output's beginning tells a call (llama, pythonic, json), and any output of all of them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from tokenspeed.grammar.interface import CompiledGrammar, GrammarOptions, Vocabulary
from tokenspeed.grammar.select import open_backend
from tokenspeed.grammar.tools import strict_calls
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.text.parsers.interface import ParseContext, ToolFormat, parse_all, tool_specs
from tokenspeed.text.parsers.registry import tool_formats

EOS = 256
MARKS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 2},
        "s": {"type": "string", "pattern": "^[ab]+$"},
        "on": {"type": "boolean"},
        "free": {"type": ["string", "null"]},
        "pick": {"enum": ["x y", "z", 3]},
        "tree": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "integer"}}}},
    },
    "required": ["n"],
    "additionalProperties": False,
}
LOOSE = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f.x-1", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": LOOSE}},
]
SCHEMAS = {"f.x-1": SCHEMA, "g": {"type": "object"}}


class Model:
    """A vocabulary of bytes, of the marks and of pieces that calls are made of."""

    def __init__(self, pieces: tuple[str, ...]) -> None:
        self.marks = {mark: 257 + place for place, mark in enumerate(MARKS)}
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *(mark.encode() for mark in MARKS)]
        self.pieces = range(len(self.tokens), len(self.tokens) + len(pieces))
        self.tokens += [piece.encode() for piece in pieces]
        vocabulary = Vocabulary(tokens=self.tokens, special_ids=tuple(self.marks.values()), eos_token_ids=(EOS,))
        self._backend = open_backend("xgrammar", vocabulary, GrammarOptions())

    def grammar(self, form: ToolFormat, tools: list[dict[str, Any]] = TOOLS, strict: str = "f.x-1") -> CompiledGrammar:
        marks = form.openings or form.marks
        assert marks is not None
        spec = strict_calls(tools, {strict}, marks)
        return self._backend.load(self._backend.compile(spec.kind, spec.text))

    def may(self, matcher: Any) -> Any:
        row = np.zeros(-(-len(self.tokens) // 32), dtype=np.int32)
        if not matcher.fill(row):
            return np.arange(len(self.tokens))
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(self.tokens)])

    def takes(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether an output may be exactly this text, its marks as tokens or spelled."""
        return all(self._takes(grammar, text, spelled) for spelled in (False, True))

    def _takes(self, grammar: CompiledGrammar, text: str, spelled: bool) -> bool:
        matcher = grammar.matcher()
        for mark, token_id in self.marks.items() if not spelled else ():
            text = text.replace(mark, chr(0xE000 + token_id))
        for char in text:
            ids = [ord(char) - 0xE000] if 0xE000 < ord(char) < 0xF000 else list(char.encode())
            if not all(matcher.accept(token_id) for token_id in ids):
                return False
        return EOS in self.may(matcher)

    def generate(self, grammar: CompiledGrammar, chance: random.Random, most: int, begin: list[str]) -> tuple[str, str]:
        """An output by chance that begins so and likes the pieces, and its finish reason."""
        matcher, ids = grammar.matcher(), [piece.encode() for piece in begin]
        assert all(matcher.accept(byte) for byte in b"".join(ids))
        for _ in range(most):
            allowed = self.may(matcher)
            likely = [token_id for token_id in allowed if token_id in self.pieces or token_id in self.marks.values()]
            if EOS in allowed and chance.random() < 0.2:
                return b"".join(ids).decode(errors="replace"), "stop"
            token_id = chance.choice(likely if likely and chance.random() < 0.9 else list(allowed))
            if token_id == EOS:
                return b"".join(ids).decode(errors="replace"), "stop"
            assert matcher.accept(int(token_id))
            ids.append(self.tokens[token_id])
        return b"".join(ids).decode(errors="replace"), "length"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(())


def parsed(form: ToolFormat, text: str) -> Any:
    return parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), text)


CALL = '{"name": "f.x-1", "parameters": {"n": 2}}'
GOOD_OBJECTS = (
    CALL,
    '{"type": "function", "name": "f.x-1", "arguments": {"n": 12, "s": "ab"}}',
    ' {"name":"f.x-1","parameters":{"n":2}}; {"name": "g", "parameters": {"q": 1}}',
)
BAD_OBJECTS = (
    '{"name": "f.x-1", "parameters": {"n": 1}}',
    '{"name": "f.x-1", "parameters": {}}',
    '{"name": "h", "parameters": {}}',
    '{"parameters": {"n": 1}, "name": "f.x-1"}',
    '{"name": "f.x-1", "p\\u0061rameters": {"n": 1}}',
    f'{CALL}; {{"name": "f.x-1", "parameters": {{"n": 1}}}}',
    f"{CALL} and text",
    CALL[:-1],
)
TEXTS = ("", "Text [1] {x} and <b>", "\n\u3000ü", "(see)", '"quoted" {"name": "f.x-1", "parameters": 1}')


def test_llama(model: Model) -> None:
    """The bug: `strict: true` had no effect in this format, where the model decides about calls."""
    form = tool_formats()["llama"]
    grammar = model.grammar(form)
    for text in (*TEXTS, "<b>x", "<<x", "[1, 2]", '{"name": "x", "age": 3}', "{"):
        assert model.takes(grammar, text), text
        assert not parsed(form, text).calls
    for good in GOOD_OBJECTS:
        for before in ("", "<|python_tag|>", "I look: <|python_tag|>", " <|python_tag|> "):
            assert model.takes(grammar, before + good), before + good
            call, *others = parsed(form, before + good).calls
            assert call.name == "f.x-1" and json.loads(call.arguments)["n"] >= 2
            assert [one.name for one in others] in ([], ["g"])
    for bad in BAD_OBJECTS:
        for before in ("", "\u3000", "<|python_tag|>", "I look: <|python_tag|>", "<<|python_tag|>"):
            assert not model.takes(grammar, before + bad), before + bad
    assert not model.takes(grammar, "<|python_tag|>print(1)")


def test_bare_json(model: Model) -> None:
    """The bug: as above."""
    form = tool_formats()["json"]
    grammar = model.grammar(form)
    for text in (*TEXTS, "<b>x", "[1, 2]", '{"name": "x", "age": 3}', '[{"name": "f.x-1"}]'):
        assert model.takes(grammar, text), text
        assert not parsed(form, text).calls
    array = f'[{CALL}, {{"name": "g", "arguments": {{}}}}]'
    for good in (*GOOD_OBJECTS, array):
        assert model.takes(grammar, good), good
        call, *_ = parsed(form, good).calls
        assert call.name == "f.x-1" and json.loads(call.arguments)["n"] >= 2
    for bad in (*BAD_OBJECTS, array.replace("2", "1"), array + " x", "[" + BAD_OBJECTS[0] + "]"):
        assert not model.takes(grammar, bad), bad
    assert not model.takes(grammar, "[]x" + CALL.replace("2", "1")), 'the word "parameters" stands there'


def test_pythonic(model: Model) -> None:
    """The bug: as above."""
    form = tool_formats()["pythonic"]
    grammar = model.grammar(form)
    for text in (
        *TEXTS,
        "<b>x",
        "[see](http://x) and [1, 2] ",
        "[",
        "[ ab",
        "[(f(n=1))]",
        "[f.x-1]",
        "[]",
        "f.x-1(n=1)",
    ):
        assert model.takes(grammar, text), text
        assert not parsed(form, text).calls
    for good, wanted in {
        "[f.x-1(n=2)]": {"n": 2},
        "[ f.x-1(n=2, s=\"ab\",on=True, free='it\\'s \"x\"', pick='x y', tree={\"k\": [1]}) ]": {
            "n": 2, "s": "ab", "on": True, "free": 'it\'s "x"', "pick": "x y", "tree": {"k": [1]},
        },
        "<|python_start|>[f.x-1(n=3, on=false, free=None, pick=3), g()]<|python_end|>": {
            "n": 3, "on": False, "free": None, "pick": 3,
        },
        '[f.x-1(n=3, free="\\/\\u00e9\\ud83d\\ude00"), g(a={"b": "\\/"}, c=\'d\')]': {"n": 3, "free": None},
    }.items():  # fmt: skip
        assert model.takes(grammar, good), good
        call, *others = parsed(form, good).calls
        found = json.loads(call.arguments)
        assert call.name == "f.x-1" and (found == wanted or wanted.get("free", 0) is None)
        jsonschema.validate(found, SCHEMA)
        assert [one.name for one in others] in ([], ["g"])
    for bad in (
        "[f.x-1(n=1)]",
        "[f.x-1()]",
        "[f.x-1(s='ab', n=2)]",
        "[f.x-1(n=2, s='c')]",
        "[f.x-1(n=2, pick='y')]",
        "[f.x-1(n=2, more=1)]",
        "[f.x-1(n=2, on='True')]",
        "[f.x-1(n='2')]",
        "[h(n=1)]",
        "[f.x-1(n=2)",
        "[f.x-1(n=2)] text",
        "[g(), f.x-1(n=1)]",
        "[ \u3000f.x-1(n=1)]",
    ):
        for before in ("", "\u3000", "<|python_start|>"):
            assert not model.takes(grammar, before + bad), before + bad


def test_python_calls_with_no_required_keyword(model: Model) -> None:
    form = tool_formats()["pythonic"]
    properties = {name: {"type": "integer"} for name in "abc"}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    ]
    grammar = model.grammar(form, tools, "f")
    for good in ("", "a=1", "b=1", "c=1", "a=1, c=2", "a=1, b=2, c=3"):
        assert model.takes(grammar, f"[f({good})]"), good
    for bad in (", a=1", "a=1,", "b=1, a=2", "a=1 b=2", "a=1, a=1"):
        assert not model.takes(grammar, f"[f({bad})]"), bad
    nothing = [{"type": "function", "function": {"name": "f"}}]
    grammar = model.grammar(form, nothing, "f")
    assert model.takes(grammar, "[f()]") and not model.takes(grammar, "[f(a=1)]")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a-b": {"type": "integer"}}},
        {"additionalProperties": {"type": "integer"}},
        {"properties": {"a": {"type": "integer"}}, "minProperties": 1},
        {"properties": {f"p{place}": {"type": "integer"} for place in range(49)}},
    ],
)
def test_what_python_calls_cannot_hold_is_refused(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
    marks = tool_formats()["pythonic"].openings
    assert marks is not None
    with pytest.raises(InvalidRequest, match=r"the tool 'f': .*tool_choice") as refusal:
        strict_calls(tools, {"f"}, marks)
    assert refusal.value.param == "tools"
    strict_calls(tools, {"g"}, marks)


PIECES = (
    '{"n": ', '"n": ', "2", "1", "}", "]", ")", ", ", "; ", '"s": ', '"ab"', "'ab'", '"c"', "True", "true", "None",
    "null", '"', "'", "\\", '"tree": {"k": [', "]}", "\n", "x", '{"name": "f.x-1", "parameters": {"n": ', "[f.x-1(n=",
    "g(", "on=", '"arguments": {', "s=", "free=", "pick=",
)  # fmt: skip


def pieces_of(form: ToolFormat) -> tuple[str, ...]:
    """What a format writes around arguments, the beginning of calls first."""
    marks = form.marks
    if marks is None:
        return (
            ("[f.x-1(n=", "<|python_start|>") if form.names[0] == "pythonic" else ('{"name": "f.x-1", "parameters": ',)
        )
    begin = marks.begin("f.x-1")
    pieces = [begin, f"1{marks.behind_number}" if marks.behind_number else "", marks.before_arguments, marks.end]
    if marks.parameters is not None:
        before, behinds = marks.parameters.begin
        for key, kind in {"n": "integer", "s": "string", "on": "boolean", "free": "null"}.items():
            typed = behinds if marks.parameters.by_type is None else marks.parameters.by_type[kind]
            pieces += [before + key + typed[0], marks.parameters.end]
    return tuple(piece for piece in pieces if piece)


@pytest.mark.parametrize(
    "name", [name for name, one in tool_formats().items() if (one.marks or one.openings) and name == one.names[0]]
)
def test_any_output_is_text_or_calls_that_obey(name: str) -> None:
    """Walks by chance through the grammar: whatever the parser then takes for a call obeys, and an output that has come
    to its end holds no broken call."""
    form, chance = tool_formats()[name], random.Random(name)
    own = pieces_of(form)
    model = Model(own + PIECES)
    grammar, num_calls = model.grammar(form), 0
    for place in range(120):
        begin = ["<|open|>tools<|sep|>"] if name == "kimi_k3" else []
        text, reason = model.generate(grammar, chance, 60, begin + ([own[0]] if place % 3 else []))
        parser = form.make(ParseContext(tools=tool_specs(TOOLS)))
        calls = parse_all(parser, text, reason).calls
        whole = calls if reason == "stop" else calls[: parser.num_whole_calls]
        # Arguments of the loose tool are free in these: it may say a parameter twice.
        if name not in ("qwen_coder", "glm45_moe", "deepseek32", "kimi_k3", "pythonic"):
            assert reason != "stop" or not parser.incomplete, text
        for one in whole:
            if one.name == "f.x-1" or reason != "stop" or not parser.incomplete:
                jsonschema.validate(json.loads(one.arguments), SCHEMAS[one.name])
        num_calls += len(whole)
    assert num_calls > 5
