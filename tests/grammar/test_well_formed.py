"""What a grammar lets through is well-formed UTF-8, however the library takes it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from grammar_support import BYTES, allowed, byte_backend, compiled

from tokenspeed.grammar.interface import GrammarError, Vocabulary
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.select import BACKENDS
from tokenspeed.grammar.well_formed import START, WellFormed

ILL_FORMED = (
    b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf",
    b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xc0\x80", b"\xc1\xbf", b"\x80", b"\xff", b"\xc3a", b"\xe2\x82a",
)  # fmt: skip
EDGES = "\x80߿ࠀ퟿\ue000\uffff\U00010000\U0010ffff"


def walks(grammar: Any, text: bytes) -> bool:
    """Whether an output may begin so, token by token."""
    matcher = grammar.matcher()
    for byte in text:
        may = byte in allowed(matcher)
        assert matcher.accept(byte) == may
        if not may:
            return False
    return True


STRINGS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 2},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "minLength": 1},
    {"type": "string"},
    {"type": "string", "pattern": "^[^a]{2}$"},
    {"type": "string", "pattern": "^.\\S*$"},
)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("schema", STRINGS)
def test_strings_hold_no_ill_formed_characters(library: str, schema: dict[str, Any]):
    """The bug: xgrammar took an encoded surrogate or an overlong form for one character. The text has three U+FFFD for
    it, so a string of maxLength 2 had six characters, and still `finish_reason` was stop."""
    grammar = compiled(byte_backend(library), "json_schema", json.dumps(rewrite_schema(schema, "x")))
    for bad in ILL_FORMED:
        assert not walks(grammar, b'"' + bad), bad
        assert not walks(grammar, b'"b' + bad), bad
    for good in EDGES:
        assert walks(grammar, f'"{good}'.encode())


@pytest.mark.parametrize("library", BACKENDS)
def test_names_other_kinds_and_free_text_hold_none(library: str):
    backend = byte_backend(library)
    grammars = [(compiled(backend, "regex", "[^,]{1,3}"), b""), (compiled(backend, "ebnf", "root ::= [^a]+"), b"")]
    if library == "xgrammar":
        names = {"type": "object", "propertyNames": {"maxLength": 3}}
        grammars.append((compiled(backend, "json_schema", json.dumps(rewrite_schema(names, "x"))), b'{"'))
        tag = {"begin": "<t>", "content": {"type": "json_schema", "json_schema": STRINGS[0]}, "end": "</t>"}
        tags = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag]}}
        free = compiled(backend, "structural_tag", json.dumps(tags))
        grammars += [(free, b"Hm "), (free, b'<t>"')]
    for grammar, before in grammars:
        for bad in ILL_FORMED:
            assert not walks(grammar, before + bad), bad
        for good in EDGES:
            assert walks(grammar, before + good.encode())


@pytest.mark.parametrize("library", BACKENDS)
def test_masks_filled_together_hold_none(library: str):
    backend = byte_backend(library)
    grammar = compiled(backend, "regex", "[^,]{3}")
    matchers = [grammar.matcher() for _ in range(4)]
    for matcher, begun in zip(matchers, (b"", b"\xed", b"\xf0", b"a\xe0"), strict=True):
        assert all(matcher.accept(byte) for byte in begun)
    rows = np.zeros((4, BYTES.num_words), dtype=np.int32)
    backend.fill_all(matchers, rows)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    for matcher, row in zip(matchers, bits, strict=True):
        assert set(np.flatnonzero(row).tolist()) == allowed(matcher)
    assert [set(np.flatnonzero(row).tolist()) for row in bits[1:]] == [
        set(range(0x80, 0xA0)), set(range(0x90, 0xC0)), set(range(0xA0, 0xC0)),
    ]  # fmt: skip


@pytest.mark.parametrize("library", BACKENDS)
def test_taken_back_inside_of_a_character(library: str):
    matcher = compiled(byte_backend(library), "regex", "[^,]{3}").matcher()
    for byte in b"\xed\x80\x80\xf4":
        assert matcher.accept(byte)
    matcher.rollback(3)
    assert allowed(matcher) == set(range(0x80, 0xA0))
    assert matcher.accept(0x9F) and not matcher.accept(ord("a"))


def test_a_grammar_of_surrogates_is_refused_as_the_users_error():
    matcher = compiled(byte_backend("xgrammar"), "ebnf", r"root ::= [\ud800-\udfff]").matcher()
    assert matcher.accept(0xED)
    with pytest.raises(GrammarError, match="no text can hold"):
        allowed(matcher)


def test_states_are_those_of_the_decoder():
    """Every text of up to three tokens goes through exactly when Python's decoder can still make characters of it."""
    leads = [bytes([byte]) for byte in (*b"a", 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1)]
    leads += [bytes([byte]) for byte in (0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF)]
    tokens = [*leads, "é€😀".encode(), b"a\xf0\x90", b"\x80\x80", b"\xbfab\xe2", b"\xed\xa0\x80", b"", b"</s>", b"<x>"]
    end, special, empty = len(tokens) - 2, len(tokens) - 1, len(tokens) - 3
    vocabulary = Vocabulary(tokens=tokens, special_ids=(special,), eos_token_ids=(end,))
    well_formed = WellFormed(vocabulary)
    bits = np.unpackbits(well_formed.masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert bits.shape == (8, 32 * vocabulary.num_words) and not bits[:, len(tokens) :].any()
    num_good = 0
    for ids in itertools.product(range(len(tokens) - 3), repeat=3):
        state: int | None = START
        for token_id in ids:
            assert state is not None
            following = well_formed.behind(state, token_id)
            assert bits[state, token_id] == (following is not None)
            state = following
            if state is None:
                break
        text = b"".join(tokens[token_id] for token_id in ids)
        assert (state is not None) == could_go_on(text), text
        assert (state == START) == decodes(text), text
        num_good += state is not None
    assert num_good > 100
    for token_id in (end, special, empty):
        assert well_formed.behind(START, token_id) == START
        assert all(well_formed.behind(state, token_id) is None for state in range(1, 8))


def decodes(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def could_go_on(text: bytes) -> bool:
    """Whether some bytes more make it well-formed."""
    return any(decodes(text + behind) for behind in (b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80",
                                                     b"\xbf\xbf\xbf", b"\xa0\x80", b"\x90\x80\x80"))  # fmt: skip
