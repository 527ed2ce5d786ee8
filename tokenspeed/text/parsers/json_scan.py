"""Where a JSON value ends, followed through pieces of text in time linear in their length.

Checks structure only (strings, escapes, brackets that match, no foreign characters between), not commas or number
spelling: the value's text goes to the client as the model wrote it.
"""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r"[\s,:0-9A-Za-z.+\-]+")
_SCALAR = re.compile(r"[0-9A-Za-z.+\-]+")
_CLOSER = {"{": "}", "[": "]"}


class JsonScan:
    """One value. Leading whitespace must be gone.

    Attributes:
        done: the value is complete.
        broken: the text cannot go on as JSON; the offending character was not taken.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []  # closing brackets that are due, innermost last
        self._in_string = False
        self._after_backslash = False
        self._in_scalar = False

    def advance(self, text: str, at: int) -> int:
        """Take as much of `text` from `at` as belongs to the value; gives the position behind it."""
        while at < len(text) and not (self.done or self.broken):
            at = self._string(text, at) if self._in_string else self._outside(text, at)
        return at

    def end(self) -> None:
        """No text will follow: a number or literal is complete now."""
        if self._in_scalar:
            self.done = True

    def _string(self, text: str, at: int) -> int:
        if self._after_backslash:
            self._after_backslash = False
            return at + 1
        run = _IN_STRING.match(text, at)
        if run is not None:
            return run.end()
        if text[at] == "\\":
            self._after_backslash = True
        else:
            self._in_string = False
            self.done = not self._open
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        run = (_BETWEEN if self._open else _SCALAR).match(text, at)
        if run is not None:
            self._in_scalar = not self._open
            return run.end()
        if self._in_scalar:
            self.done = True
            return at
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._open.append(_CLOSER[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.broken = True
            return at
        return at + 1
