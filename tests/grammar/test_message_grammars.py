"""Harmony: what the grammar of a whole output lets through is what the format's parser reads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tokenspeed.grammar.interface import CompiledGrammar, GrammarOptions, Vocabulary
from tokenspeed.grammar.messages import answer_or_call_in_messages
from tokenspeed.grammar.select import open_backend
from tokenspeed.grammar.spec import make_spec
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.text.parsers.harmony import SPELLINGS
from tokenspeed.text.parsers.interface import ParseContext, parse_all, tool_specs
from tokenspeed.text.parsers.tools.gpt_oss import FORMAT

MARKS = ("<|endoftext|>", "<|other|>", *SPELLINGS)
TOKENS = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in MARKS)]
IDS = {mark: 256 + place for place, mark in enumerate(MARKS)}
EOS = tuple(IDS[mark] for mark in ("<|endoftext|>", "<|return|>", "<|call|>"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f.x-1", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, to=functions.g <b>.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f.x-1 <|constrain|>json<|message|>{"a": "1"}'
IN_FRONT = ' to=functions.f.x-1<|channel|>commentary json<|message|>{"a": "1"}'
LOOSE = '<|channel|>commentary to=functions.g<|message|>{"b": [1]}'


@pytest.fixture(scope="module")
def backend() -> Any:
    vocabulary = Vocabulary(tokens=TOKENS, special_ids=tuple(IDS.values()), eos_token_ids=EOS)
    return open_backend("xgrammar", vocabulary, GrammarOptions())


def compiled(backend: Any, answer: GrammarSpec | None, strict: set[str]) -> CompiledGrammar:
    assert FORMAT.messages is not None
    spec = answer_or_call_in_messages(answer, TOOLS, strict, FORMAT.messages, IDS.get)
    assert spec is not None and spec.kind == "token_tag"
    assert spec.param == ("tools" if answer is None else answer.param)
    loaded: CompiledGrammar = backend.load(backend.compile(spec.kind, spec.text))
    return loaded


def may(matcher: Any) -> set[int]:
    row = np.zeros(-(-len(TOKENS) // 32), dtype=np.int32)
    if not matcher.fill(row):
        return set(range(len(TOKENS)))
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist())


def takes(grammar: CompiledGrammar, text: str, spelled: bool = False) -> bool:
    """Whether an output may be exactly this text. `spelled`: marks in it are bytes, not tokens."""
    matcher = grammar.matcher()
    pieces = [text] if spelled else re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    for piece in pieces:
        for token_id in [IDS[piece]] if piece in IDS else piece.encode():
            is_allowed = token_id in may(matcher)
            assert matcher.accept(token_id) == is_allowed, "mask and acceptance differ"
            if not is_allowed:
                return False
    return set(EOS) <= may(matcher)


def test_strict_calls_among_messages(backend: Any) -> None:
    """The bug: `strict: true` had no effect on gpt-oss where the model decides about calls."""
    grammar = compiled(backend, None, {"f.x-1"})
    for before in ("", THOUGHT, THOUGHT + THOUGHT, PREAMBLE, THOUGHT + PREAMBLE + THOUGHT):
        for last in (f"{FINAL}Any {{<b>", CALL, IN_FRONT, LOOSE):
            assert takes(grammar, before + last), (before, last)
    assert takes(grammar, f"<|start|>assistant{PREAMBLE}{CALL}"), "behind a reasoning that is over"
    for bad in (
        CALL.replace('"1"', "1"),
        CALL.replace('"a"', '"b"'),
        CALL.removesuffix("}"),
        IN_FRONT.replace('"1"', "1"),
        CALL.replace("f.x-1", "h"),
        LOOSE.replace('{"b": [1]}', "[1]"),
        CALL.replace("functions.", ""),
        f"<|start|>assistant{THOUGHT}{CALL}",  # a budget of thinking would not hold
        CALL + NEXT + CALL,
        THOUGHT,
        THOUGHT.removesuffix(NEXT),
        "No message.",
    ):
        assert not takes(grammar, bad), bad
        assert not takes(grammar, THOUGHT + bad), bad


def test_marks_in_a_body_are_tokens_or_text(backend: Any) -> None:
    """Text that spells a mark goes on; the token ends the body, and is in no argument."""
    grammar = compiled(backend, None, {"f.x-1"})
    matcher = grammar.matcher()
    for token_id in (IDS["<|channel|>"], *b"final", IDS["<|message|>"], *b"<|end|>, <|start|>"):
        assert matcher.accept(token_id)
    assert may(matcher) - set(range(256)) == {*EOS, IDS["<|other|>"]}
    matcher = grammar.matcher()
    for piece in re.split("(<[^<>]*>)", CALL[: CALL.index('1"}')]):
        for token_id in [IDS[piece]] if piece in IDS else piece.encode():
            assert matcher.accept(token_id)
    assert not may(matcher) & set(IDS.values())
    assert all(matcher.accept(token_id) for token_id in b'<|call|>"}') and set(EOS) <= may(matcher)
    matcher = grammar.matcher()
    for token_id in (IDS["<|channel|>"], *b"analysis", IDS["<|message|>"], *b"Hm"):
        assert matcher.accept(token_id)
    assert not may(matcher) & set(EOS)
    assert not takes(grammar, f"{FINAL}x", spelled=True)


def test_an_answer_or_a_call(backend: Any) -> None:
    """The bug: `response_format` beside tools was refused for gpt-oss."""
    for kind, value, good, bad in (
        ("json", {"type": "integer"}, "12", '"x"'),
        ("regex", "ab+", "abb", "c"),
        ("grammar", 'root ::= "yes"', "yes", "no"),
    ):
        grammar = compiled(backend, make_spec(kind, value, "response_format"), {"f.x-1"})
        for before in ("", THOUGHT, "<|start|>assistant"):
            assert takes(grammar, before + FINAL + good) and not takes(grammar, before + FINAL + bad)
            assert takes(grammar, f"{before}<|channel|>final <|constrain|>json<|message|>{good}")
            assert takes(grammar, before + CALL) and takes(grammar, before + LOOSE)
            assert not takes(grammar, before + CALL.replace('"1"', "1"))
        assert not takes(grammar, PREAMBLE + FINAL + good), "the content would not be the answer alone"
        assert not takes(grammar, good)
    tag = make_spec("structural_tag", {"format": {"type": "any_text"}}, "response_format")
    assert FORMAT.messages is not None
    assert answer_or_call_in_messages(tag, TOOLS, set(), FORMAT.messages, IDS.get) is None
    assert answer_or_call_in_messages(None, TOOLS, {"g"}, FORMAT.messages, {}.get) is None, "no special tokens"


@pytest.mark.parametrize("place", range(8))
def test_every_header_is_read_as_a_call(place: int, backend: Any) -> None:
    assert FORMAT.messages is not None
    headers = FORMAT.messages.call("f.x-1")
    assert len(headers) == 8
    text = THOUGHT + headers[place] + '{"a": "1"}'
    assert takes(compiled(backend, None, {"f.x-1"}), text)
    parsed = parse_all(FORMAT.make(ParseContext(tools=tool_specs(TOOLS), prompt="<|start|>assistant")), text)
    assert [(one.name, one.arguments) for one in parsed.calls] == [("f.x-1", '{"a": "1"}')]
