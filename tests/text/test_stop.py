from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.text.stop import StopChecker

texts = st.text("abc", max_size=24)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool, barrier: int) -> tuple[str, str | None]:
    """The text up to the match with the least end above `barrier`, the longest of several; by trying every end."""
    for end in range(barrier + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(text=texts, stops=stop_lists, include=st.booleans(), barrier=st.integers(0, 24), data=st.data())
def test_any_split_equals_naive(text: str, stops: list[str], include: bool, barrier: int, data: st.DataObject) -> None:
    barrier = min(barrier, len(text))
    cuts = sorted({0, barrier, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    checker = StopChecker(stops, include)
    emitted, matched = "", None
    for start, end in itertools.pairwise(cuts):
        piece, matched = checker.feed(text[start:end], may_match=end > barrier)
        emitted += piece
        want, _ = naive(text, stops, include, barrier)
        assert want.startswith(emitted), "text that a stop string takes back was given away"
    emitted += checker.flush()
    assert (emitted, matched) == naive(text, stops, include, barrier)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=60), stops=st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=3))
def test_what_is_held_is_the_longest_beginning(text: str, stops: list[str]) -> None:
    """Strings full of repetitions, a character at a time. Comparing every beginning anew once made 64 stop strings
    of 1024 characters, with a text of their kind, cost the event loop 12 ms a token."""
    checker = StopChecker(stops)
    emitted = ""
    for end in range(1, len(text) + 1):
        emitted += checker.feed(text[end - 1], may_match=False)[0]
        held = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert emitted == text[: end - held]


def test_holds_back_only_while_ambiguous() -> None:
    checker = StopChecker(["</end>"])
    assert checker.feed("hello <") == ("hello ", None)
    assert checker.feed("b> x</en") == ("<b> x", None)
    assert checker.feed("d> ignored") == ("", "</end>")
    assert checker.feed("more") == ("", "</end>")
    assert checker.flush() == ""


def test_flush_gives_the_rest() -> None:
    checker = StopChecker(["abc"])
    assert checker.feed("xab") == ("x", None)
    assert checker.flush() == "ab"


def test_include_keeps_the_match() -> None:
    assert StopChecker(["b"], include=True).feed("abc") == ("ab", "b")


def test_min_tokens_text_does_not_match_but_may_begin_a_match() -> None:
    checker = StopChecker(["ab"])
    assert checker.feed("ab a", may_match=False) == ("ab ", None)
    assert checker.feed("bc") == ("", "ab")


def test_no_stops_holds_nothing_and_empty_stops_are_refused() -> None:
    assert StopChecker([]).feed("abc") == ("abc", None)
    with pytest.raises(ValueError, match="empty stop string"):
        StopChecker(["a", ""])
