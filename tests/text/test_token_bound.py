"""What a text needs at least, told without tokenizing it, is never more than what it has."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.text.codec import Tokenizer, byte_level_alphabet

RUN = "\u0120" * 8  # eight spaces are one token

TEXT = st.lists(
    st.sampled_from(
        [" ", "        ", "a", "ab", "\x04", "é", "e\u0301", "\u03b0", "υ\u0308\u0301", "한", "각", "<s>", "日", "ﬀ"]
    ),
    max_size=60,
).map("".join)


def byte_level(**parts: object) -> Tokenizer:
    """A byte-level tokenizer of bytes and runs of spaces, with other parts in the place of its own."""
    alphabet = [char for char in byte_level_alphabet() if char != parts.get("lost")]
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = []
    for half in (1, 2, 4):
        merges.append(("\u0120" * half, "\u0120" * half))
        vocab["\u0120" * half * 2] = len(vocab)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        if name not in ("added", "lost"):
            setattr(backend, name, part)
    backend.add_special_tokens([parts.get("added", "<s>")])  # type: ignore[list-item]
    return Tokenizer(backend, vocab_size=len(vocab) + 1, special_tokens={}, chat_templates={}, origin="test")


def spelled(*tokens: str, fallback: bool) -> Tokenizer:
    """A SentencePiece-like vocabulary."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    vocab = {token: index for index, token in enumerate(["<unk>", *bytes_, "\u2581", *tokens])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, vocab_size=len(vocab), special_tokens={}, chat_templates={}, origin="test")


KNOWN = {
    "byte level": lambda: byte_level(),
    "lacks bytes": lambda: byte_level(lost="a"),
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "nfkc": lambda: byte_level(normalizer=normalizers.NFKC()),
    "nfkd": lambda: byte_level(normalizer=normalizers.NFKD()),
    "byte fallback": lambda: spelled("a", "b", "ab", "é", fallback=True),
}

SAYS_NOTHING = {
    "spaces go with an added token": lambda: byte_level(added=AddedToken("<s>", special=True, rstrip=True)),
    "spaces are removed": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    ),
    "stripped": lambda: byte_level(normalizer=normalizers.Strip()),
    "shortened": lambda: byte_level(normalizer=normalizers.Replace("aaaa", "a")),
    "by a pattern": lambda: byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "twice": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
    "unknown characters are one token": lambda: spelled("a", fallback=False),
}


@pytest.mark.parametrize("name", sorted(KNOWN))
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_no_text_has_fewer(name: str, text: str) -> None:
    tokenizer = KNOWN[name]()
    for special in (False, True):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False, special))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_long_text_needs_many(name: str) -> None:
    assert KNOWN[name]().least_tokens("x" * 80_000) >= 10_000
    assert KNOWN[name]().least_tokens("日" * 80_000) >= 6_000


@pytest.mark.parametrize("name", sorted(SAYS_NOTHING))
def test_where_text_is_lost_nothing_is_said(name: str) -> None:
    assert SAYS_NOTHING[name]().least_tokens("a b" * 100_000) == 0


def test_the_default_models_text(smollm: Tokenizer) -> None:
    assert 0 < smollm.least_tokens("word " * 10_000) <= len(smollm.encode("word " * 10_000))


def test_composing_leaves_two_bytes_for_three_characters() -> None:
    """The bound counts a character of normalized text as two thirds of a byte."""
    for code in range(0x110000):
        char = chr(code)
        if unicodedata.category(char) in ("Cs", "Cn", "Co"):
            continue
        for compose, decompose in (("NFC", "NFD"), ("NFKC", "NFKD")):
            parts = unicodedata.normalize(decompose, char)
            assert 1 <= len(parts) <= len(unicodedata.normalize(compose, char).encode()) * 1.5, hex(code)
