"""Stop strings in a stream of text, across every boundary of its pieces.

The stream ends with the first stop string that is complete: the match with the earliest *end*; of several that end
there, the longest. (By earliest start, a match could be undone by text that comes later.) The result is the same
however the text is split. Text is held back only while it may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """One sequence's stop strings.

    Args:
        stops: non-empty strings; may be no strings at all.
        include: the matched string stays in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if not all(self._stops):
            raise ValueError("an empty stop string would end every text at once")
        self._include = include
        self._begun = [_Begun(stop) for stop in self._stops]
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str, may_match: bool = True) -> tuple[str, str | None]:
        """Take text, give `(text that is certain now, matched stop string or None)`.

        After a match the stream is over: later calls give `("", matched)`.

        Args:
            may_match: False while fewer than min_tokens tokens exist. A stop string that ends inside such text is
                ordinary text; one that begins there and ends later counts.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        buffer = self._held + text
        if may_match:
            found = self._first_match(buffer, len(self._held))
            if found is not None:
                start, stop = found
                self._held, self._matched = "", stop
                return buffer[: start + len(stop) if self._include else start], stop
        cut = len(buffer) - max(begun.feed(text) for begun in self._begun)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The sequence has ended otherwise: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, checked: int) -> tuple[int, str] | None:
        """(start, stop) of the match with the least end above `checked`, the length that has been checked before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, checked + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])


class _Begun:
    """How much of one stop string the end of a stream may be the beginning of.

    Knuth, Morris and Pratt's search, whose cost does not depend on the strings: a user chooses them, and may choose the
    text too (logit_bias), so comparing every beginning anew would let one request hold up all others. The table of
    borders grows with the longest beginning seen; most strings never get beyond a few characters.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._length = 0
        self._borders = [0]  # [i]: length of the longest beginning of stop[:i + 1], not all of it, that is its end too

    def feed(self, text: str) -> int:
        """Length of the longest end of the stream that is a beginning of the stop string, but not all of it."""
        stop, borders, length = self._stop, self._borders, self._length
        if not length and stop[0] not in text:
            return 0
        for char in text:
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length > len(borders):
                border = borders[-1]
                while border and stop[border] != char:
                    border = borders[border - 1]
                borders.append(border + (stop[border] == char))
            if length == len(stop):  # complete, yet not a match: too early
                length = borders[length - 1]
        self._length = length
        return length
