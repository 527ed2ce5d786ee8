from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.detokenizer import Detokenizer

TEXTS = ["Hello 日本語 😀👨‍👩‍👧‍👦 é\u0301", "  spaces  first", "naïve 日本 😀\n\n", " ", "العربية"]


@st.composite
def id_lists(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    """Chunks of ids: random ones, special ones, and single-byte tokens that form and break characters."""
    ids = st.one_of(st.integers(0, vocab_size + 20), st.integers(0, 300))
    return draw(st.lists(st.lists(ids, max_size=6), max_size=12))


def stream(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.feed(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_any_split_equals_decode(name: str, skip_special: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)

    @settings(max_examples=200, deadline=None)
    @given(chunks=id_lists(tokenizer.vocab_size))
    def check(chunks: list[list[int]]) -> None:
        flat = [token_id for chunk in chunks for token_id in chunk]
        want = tokenizer.decode(flat, skip_special_tokens=skip_special)
        assert "".join(stream(Detokenizer(tokenizer, skip_special), chunks)) == want

    check()


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_one_token_at_a_time_never_gives_part_of_a_character(
    name: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(Detokenizer(tokenizer), [[token_id] for token_id in ids])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_unfinished_character_is_held_and_then_replaced(smollm: Tokenizer) -> None:
    ids = smollm.encode("😀")
    assert len(ids) > 1
    detokenizer = Detokenizer(smollm)
    assert [detokenizer.feed([token_id]) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd" == smollm.decode(ids[:-1])


def test_continuation_keeps_the_first_space(sentencepiece: Tokenizer) -> None:
    """A completion goes on from its prompt: `Once upon` + ` a time` must not lose the space."""
    ids = sentencepiece.encode("the fox", add_special_tokens=False)
    assert "".join(stream(Detokenizer(sentencepiece), [ids])) == "the fox"
    assert "".join(stream(Detokenizer(sentencepiece, continues=True), [ids])) == " the fox"
