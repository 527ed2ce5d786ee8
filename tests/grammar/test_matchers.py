"""The face of a library: ends, rollback, special tokens, structural tags."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from grammar_support import BYTES, EOS, SPECIAL, allowed, byte_backend, compiled, takes

from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.select import BACKENDS

LIBRARIES = pytest.mark.parametrize("library", BACKENDS)


@LIBRARIES
def test_a_finished_grammar_allows_only_the_end(library: str):
    matcher = compiled(byte_backend(library), "regex", "ab").matcher()
    assert allowed(matcher) == {ord("a")}
    assert matcher.accept(ord("a"))
    assert not matcher.accept(ord("x"))
    assert matcher.accept(ord("b"))
    assert allowed(matcher) == {EOS}
    assert not matcher.is_terminated
    assert matcher.accept(EOS)
    assert matcher.is_terminated
    assert allowed(matcher) == {EOS}
    assert not matcher.accept(ord("a"))


@LIBRARIES
def test_the_end_is_refused_before_it_is_reached(library: str):
    matcher = compiled(byte_backend(library), "regex", "ab").matcher()
    assert not matcher.accept(EOS)
    assert matcher.accept(ord("a"))


@LIBRARIES
def test_rollback(library: str):
    matcher = compiled(byte_backend(library), "regex", "a[bc]d").matcher()
    for token_id in (*b"abd", EOS):
        assert matcher.accept(token_id)
    matcher.rollback(3)
    assert not matcher.is_terminated
    assert allowed(matcher) == {ord("b"), ord("c")}
    for token_id in (*b"cd", EOS):
        assert matcher.accept(token_id)


@LIBRARIES
def test_many_masks_at_once_are_those_of_each(library: str):
    backend = byte_backend(library)
    grammars = [compiled(backend, "regex", pattern) for pattern in ("ab", "[a-z]+", "[^,]*", "x|yz")]
    matchers = [grammars[place % 4].matcher() for place in range(11)]
    for matcher in matchers[1:8:2]:
        assert matcher.accept(ord("a")) or matcher.accept(ord("x"))
    rows = np.full((len(matchers), BYTES.num_words), 0x5A5A5A5A, dtype=np.int32)
    backend.fill_all(matchers, rows)
    for matcher, row in zip(matchers, rows, strict=True):
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(BYTES.tokens)]
        assert set(np.flatnonzero(bits).tolist()) == allowed(matcher)


@LIBRARIES
def test_matchers_are_independent(library: str):
    grammar = compiled(byte_backend(library), "regex", "ab")
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(ord("a"))
    assert allowed(first) == {ord("b")}
    assert allowed(second) == {ord("a")}
    assert grammar.num_bytes > 0


@LIBRARIES
def test_special_tokens_are_no_text(library: str):
    """`<tool>` spelled inside a string is seven characters; the token of that spelling is none of them."""
    grammar = compiled(byte_backend(library), "regex", "<tool>.*")
    assert SPECIAL not in allowed(grammar.matcher())
    assert takes(grammar, "<tool>x")
    string = compiled(byte_backend(library), "json_schema", '{"type":"string"}').matcher()
    assert string.accept(ord('"'))
    assert SPECIAL not in allowed(string)


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}
        ],
    },
}


def test_structural_tags():
    grammar = compiled(byte_backend("xgrammar"), "structural_tag", json.dumps(TAG))
    assert takes(grammar, "free text <f=a>12</f> more")
    assert not takes(grammar, "free <f=a>x</f>")
    with pytest.raises(GrammarError):
        byte_backend("xgrammar").compile("structural_tag", '{"type": "structural_tag", "format": {"type": "nonsense"}}')
    with pytest.raises(GrammarError, match="--grammar-backend xgrammar"):
        byte_backend("llguidance").compile("structural_tag", json.dumps(TAG))


def test_structural_tags_may_begin_with_a_special_token():
    tag = {"type": "tag", "begin": "<tool>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ""}
    grammar = compiled(
        byte_backend("xgrammar"), "structural_tag", json.dumps({"type": "structural_tag", "format": tag})
    )
    assert SPECIAL in allowed(grammar.matcher())


def test_vocabulary_words():
    assert BYTES.num_words == 9
    assert BYTES.text_tokens()[SPECIAL] == b""


TOKEN = {"type": "token", "token": "<tool>"}
SPELLED: list[tuple[dict[str, Any], set[int], set[int]]] = [
    (TOKEN, {SPECIAL}, {97, EOS}),
    ({"type": "token", "token": "a"}, {97}, {98, SPECIAL, EOS}),
    ({"type": "token", "token": "</s>"}, {EOS}, {97, SPECIAL}),
    ({"type": "exclude_token", "exclude_tokens": ["<tool>", 98]}, {97}, {98, SPECIAL}),
    ({"type": "any_tokens", "exclude_tokens": ["<tool>"]}, {97, 98}, {SPECIAL}),
    ({"type": "tag", "begin": TOKEN, "content": {"type": "any_text"}, "end": TOKEN}, {SPECIAL}, {97}),
    ({"type": "token_dispatch", "rules": [["<tool>", {"type": "const_string", "value": "a"}]]}, {SPECIAL, 97}, set()),
]


@pytest.mark.parametrize(("form", "good", "bad"), SPELLED, ids=[form["type"] for form, _, _ in SPELLED])
def test_structural_tags_name_tokens_by_their_spelling(form: dict[str, Any], good: set[int], bad: set[int]):
    """The bug: 'Token string resolution requires tokenizer_info'."""
    text = json.dumps({"type": "structural_tag", "format": form})
    may = allowed(compiled(byte_backend("xgrammar"), "structural_tag", text).matcher())
    assert may >= good and not may & bad


@pytest.mark.parametrize("token", ["", "<nothing>"])
def test_a_token_that_there_is_not_is_named(token: str):
    text = json.dumps({"type": "structural_tag", "format": {"type": "token", "token": token}})
    with pytest.raises(GrammarError, match=f"no token is spelled '{token}'; name it by its id"):
        byte_backend("xgrammar").compile("structural_tag", text)
