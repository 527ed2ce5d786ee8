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
from tokenspeed.grammar.tools import answer_or_calls, strict_calls
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.text.parsers.interface import CallMarks, ParseContext, ToolFormat, parse_all, tool_specs
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
        spelled = "".join((*marks.section, marks.begin("f"), marks.behind_number or "", marks.end))
        self.specials = sorted(set(re.findall(r"<[^<>]*>", spelled)))
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
    return marks.begin(name) + numbered + arguments + marks.end


@pytest.mark.parametrize(("form", "marks"), FORMATS)
def test_strict_calls_among_free_text(form: ToolFormat, marks: CallMarks):
    """The bug: `strict: true` had no effect where the model decides about calls."""
    model = Model(marks)
    grammar = model.compiled(strict_calls(TOOLS, {"f.x-1"}, marks))
    good = call(marks, "f.x-1", '{"a": 1}')
    calls = marks.section[0] + good + marks.separator + call(marks, "g", '{"b": [1]}', 12) + marks.section[1]
    assert model.takes(grammar, 'No call, but <b>, {"name": "f"} and [1].')
    assert model.takes(grammar, f"<think>Hm</think> I look. {calls}")
    assert not model.takes(grammar, call(marks, "f.x-1", '{"a": "1"}'))
    assert not model.takes(grammar, call(marks, "f.x-1", "{}"))
    assert not model.takes(grammar, call(marks, "h", "{}"))
    assert not model.takes(grammar, good.removesuffix(marks.end))
    parsed = parse_all(form.make(ParseContext(tools=tool_specs(TOOLS))), f"I look. {calls}")
    assert [(one.name, one.arguments) for one in parsed.calls] == [("f.x-1", '{"a": 1}'), ("g", '{"b": [1]}')]
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


def test_structural_tags_are_no_alternative_and_bad_schemas_are_named():
    marks = next(iter(FORMATS)).values[1]
    tag = make_spec("structural_tag", {"format": {"type": "any_text"}}, "response_format")
    assert answer_or_calls(tag, TOOLS, set(), marks, True) is None
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {"const": 1}}}}}}]
    with pytest.raises(InvalidRequest, match="parameters of the tool 'f'"):
        strict_calls(bad, {"f"}, marks)
    assert json.loads(strict_calls(bad, set(), marks).text)["format"]["type"] == "triggered_tags"
