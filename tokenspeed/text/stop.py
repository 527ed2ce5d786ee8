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
        cut = len(buffer) - self._longest_beginning(buffer)
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

    def _longest_beginning(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is the beginning of a stop string, but not all of it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
