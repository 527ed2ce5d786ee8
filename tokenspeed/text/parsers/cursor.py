"""The text that has arrived and is not consumed, and the questions that a grammar may ask of it.

A grammar is a generator: it yields when it needs more text. Every question here is answered only when no later text
could change the answer, and so every grammar made of them gives the same result for every split of the text.

No question looks at a character more often than a small constant: `work` counts the characters looked at, tests hold
it to a multiple of the input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from tokenspeed.text.parsers.json_scan import JsonScan
from tokenspeed.text.parsers.model_json import read_json

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")


def drop(text: str) -> None:
    """The sink for text that is markup."""


class Markers:
    """Strings that end a stretch of text.

    None may be part of another: then the first that is complete is also the first that begins, and there is no doubt
    for any split of the text.
    """

    def __init__(self, *spellings: str) -> None:
        for spelling in spellings:
            if not spelling or any(spelling in other for other in spellings if other is not spelling):
                raise ValueError(f"marker {spelling!r} is empty or part of another of {spellings}")
        self.pattern = re.compile("|".join(map(re.escape, spellings)))
        self.longest = max(map(len, spellings))
        self._heads = frozenset(spelling[:cut] for spelling in spellings for cut in range(1, len(spelling)))

    def held(self, text: str, at: int) -> int:
        """Length of the longest end of `text` behind `at` that may be the beginning of a marker."""
        for length in range(min(self.longest - 1, len(text) - at), 0, -1):
            if text[-length:] in self._heads:
                return length
        return 0


class Cursor:
    """One sequence's text."""

    def __init__(self) -> None:
        self.work = 0
        self._text = ""
        self._at = 0
        self._ended = False
        self._cut = False
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        """More text has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, cut: bool = False) -> None:
        """No text will follow. `cut`: by the length limit, so the model had more to say."""
        self._ended = True
        self._cut = cut

    @property
    def held(self) -> int:
        """Characters that have arrived and are not consumed."""
        return len(self._text) - self._at

    @property
    def ended(self) -> bool:
        """No text will follow what is held."""
        return self._ended

    @property
    def cut(self) -> bool:
        """No text will follow, though the model had more to say."""
        return self._cut

    def discard(self) -> None:
        """Consume all that is held."""
        self._take(len(self._text))

    # Recording: the raw text of what may turn out not to be a call.

    def record(self, consumed: str) -> None:
        """Keep what is consumed from here on, behind `consumed`, which was just consumed."""
        self._record = [consumed]

    def recorded(self) -> str:
        """All that was consumed since `record`; ends the recording."""
        record, self._record = self._record, None
        return "".join(record or ())

    def begun(self) -> str:
        """All that was consumed since `record`, and what is held."""
        return "".join(self._record or ()) + self._text[self._at :]

    # Questions.

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters; fewer only at the end."""
        while self.held < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def literal(self, spelling: str) -> Steps[bool]:
        """Consume `spelling` if it is next."""
        while True:
            have = self._text[self._at : self._at + len(spelling)]
            self.work += len(have)
            if have == spelling:
                self._take(self._at + len(spelling))
                return True
            if self._ended or not spelling.startswith(have):
                return False
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Give the characters that `pattern`, a character class with `*`, matches; returns the next character, "" at
        the end."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self.work += match.end() - self._at + 1
            self._give(match.end(), sink)
            if self.held or self._ended:
                return self._text[self._at : self._at + 1]
            yield

    def space(self) -> Steps[None]:
        """Consume whitespace."""
        yield from self.run(_SPACE, drop)

    def until(
        self, markers: Markers, sink: Sink, drop_tail: bool = False, leave: Collection[str] = (), special: str = ""
    ) -> Steps[str | None]:
        """Give text to `sink` up to the first marker and consume both; None when the text ends without one.

        Args:
            drop_tail: an end of the whole text that may be the beginning of a marker is not given.
            leave: those of the markers that are not consumed.
            special: a special token in the markers, so that no text has it: an end of the text that was cut, may be the
                beginning of a marker and has it, is not given.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            self.work += self.held if found is None else found.end() - self._at
            if found is not None:
                self._give(found.start(), sink)
                self._take(found.start() if found.group() in leave else found.end())
                return found.group()
            keep = markers.held(self._text, self._at)
            if self._ended and not drop_tail:
                is_marker = self._cut and special and special in self._text[len(self._text) - keep :]
                keep = keep if is_marker else 0
            self._give(len(self._text) - keep, sink)
            if self._ended:
                self.discard()
                return None
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Give all text that still comes to `sink`."""
        while True:
            self._give(len(self._text), sink)
            if self._ended:
                return
            yield

    def within(self, markers: Markers, limit: int, leave: bool = False) -> Steps[tuple[str, str] | None]:
        """(text before the first marker, marker), both consumed; None, and nothing consumed, when the text ends or no
        marker begins within `limit` characters. `leave`: the marker is not consumed."""
        checked = 0
        while True:
            start = self._at + max(0, checked - markers.longest + 1)
            end = min(len(self._text), self._at + limit + markers.longest)
            found = markers.pattern.search(self._text, start, end)
            self.work += end - start
            if found is not None and found.start() - self._at <= limit:
                text = self._text[self._at : found.start()]
                self._take(found.start() if leave else found.end())
                return text, found.group()
            checked = self.held
            if self._ended or found is not None or checked >= limit + markers.longest:
                return None
            yield

    def json_value(self, sink: Sink) -> Steps[bool]:
        """Give the JSON value that is next to `sink` as it comes. False: it is broken, or the text ended inside it."""
        scan = JsonScan()
        while True:
            end = scan.advance(self._text, self._at)
            self.work += end - self._at
            self._give(end, sink)
            if scan.done or scan.broken:
                return scan.done
            if self._ended:
                scan.end()
                return scan.done
            yield

    def json_string(self, limit: int, broken: Sink = drop) -> Steps[str | None]:
        """The JSON string that is next, decoded. None: there is none, or its text is longer than `limit` characters;
        what was looked at may be consumed then, and is given to `broken`."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        scan = JsonScan()
        room = limit
        while True:
            end = min(scan.advance(self._text, self._at), self._at + room)
            room -= end - self._at
            self.work += end - self._at
            self._give(end, parts.append)
            if scan.done and room > 0:
                return decode_string("".join(parts))
            if room <= 0 or self._ended:
                broken("".join(parts))
                return None
            yield

    def _give(self, end: int, sink: Sink) -> None:
        if end > self._at:
            sink(self._take(end))

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text


def decode_string(raw: str) -> str | None:
    """The value of a JSON string literal, control characters in it allowed; None when it is none."""
    try:
        value = read_json(raw, control_characters=True)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
