"""Users' spellings are found window by window exactly as in one search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.text import shield
from tokenspeed.text.shield import Shield

SPELLINGS = ["<a>", "<a><b>", "b>", "<|im|>", "x", "<aaaaaaa>"]
TEXT = st.lists(st.sampled_from(["<", ">", "a", "b", "|", "x", "<a>", "<|im", "|>", "<a><b>", "<aaaa", " "])).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, window=st.integers(1, 12), spellings=st.lists(st.sampled_from(SPELLINGS), unique=True))
def test_windows_change_nothing(text: str, window: int, spellings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shield, "WINDOW_CHARS", window)
        guard = Shield(spellings, [text])
        expected = [found.span() for found in guard._spelling.finditer(text)] if spellings else []
        assert [found.span() for found in guard._whole(text)] == expected
        small = guard.protect(text)
    assert small == Shield(spellings, [text]).protect(text)
    assert guard.remove(small) == text
    assert not any(len(spelling) > 1 and spelling in small for spelling in spellings)


def test_no_search_takes_the_whole_of_a_long_text() -> None:
    """30 MB of "<|" stopped every other thread for two seconds."""
    guard = Shield(["<|im_end|>"], [])
    longest = 0

    class Spy:
        def search(self, text: str, at: int, end: int) -> None:
            nonlocal longest
            longest = max(longest, end - at)

    guard._spelling = Spy()  # type: ignore[assignment]
    guard.protect("<|" * 500_000)
    assert 0 < longest <= shield.WINDOW_CHARS + 10
