"""Keeps users' text from spelling special tokens, without the template noticing.

A *breaker* character, one that occurs in no text at hand, is put inside every spelling of a special token in every
string that a user supplied, also inside an end that begins a spelling and a beginning that ends one, so that neighbours
cannot join into one. All other text reaches the template untouched, so it may strip, split and compare as ever. After
rendering, whole spellings are the template's own; `Tokenizer.encode_rendered` makes those special and takes the breaker
out. A template that writes both ends around a string (`'<|' + role + '|>'`) means it; `ChatTemplate` looks at roles.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenspeed.protocol.errors import InvalidRequest

# Noncharacters: Unicode reserves them for use inside a program, so real text has none.
_BREAKERS = [chr(code) for code in range(0xFDD2, 0xFDF0)]

MAX_DEPTH = 64
WINDOW_CHARS = 1 << 16


class Shield:
    """For one rendering.

    Args:
        spellings: of all special tokens.
        texts: everything that will be rendered, templates included; decides which breaker is free.
    """

    def __init__(self, spellings: Iterable[str], texts: Iterable[Any]) -> None:
        spellings = sorted(spellings, key=len, reverse=True)
        self.breaker, self.mark = _free_characters(texts)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) if spellings else r"(?!)")
        self._heads = {spelling[:cut] for spelling in spellings for cut in range(1, len(spelling))}
        self._tails = {spelling[cut:] for spelling in spellings for cut in range(1, len(spelling))}
        self._longest = max(map(len, spellings), default=0)
        # A spelling of one character cannot be broken from inside; the breaker goes in front of what it stands for.
        self._single = {spelling for spelling in spellings if len(spelling) == 1}

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like `value` with every string, dict keys included, protected."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def remove(self, text: str) -> str:
        """The text as it was before protection."""
        return text.replace(self.breaker, "")

    def _protect_text(self, text: str) -> str:
        # Breaking one spelling may leave another that overlapped it, so until none is whole.
        while any(found[0] not in self._single for found in self._whole(text)):
            text = self._broken(text)
        for single in self._single:
            text = text.replace(single, self.breaker + single)
        cut = next((n for n in range(1, min(len(text), self._longest) + 1) if text[:n] in self._tails), 0)
        if cut:
            # In front of the first visible character: at the very start it would stop a template's trim.
            at = cut - len(text[:cut].lstrip())
            text = text[: at % cut] + self.breaker + text[at % cut :]
        cut = next((n for n in range(1, min(len(text), self._longest) + 1) if text[-n:] in self._heads), 0)
        if cut:
            at = len(text) - (cut - len(text[-cut:].rstrip())) % cut
            text = text[:at] + self.breaker + text[at:]
        return text

    def _broken(self, text: str) -> str:
        done, parts = io.StringIO(), list[str]()
        at = 0
        for found in self._whole(text):
            spelling = found[0]
            if spelling not in self._single:
                parts += (text[at : found.start()], spelling[0], self.breaker, spelling[1:])
                at = found.end()
                if len(parts) > WINDOW_CHARS:  # joined and freed bit by bit, which holds up other threads as well
                    done.write("".join(parts))
                    parts.clear()
        done.write("".join([*parts, text[at:]]))
        return done.getvalue()

    def _whole(self, text: str) -> Iterator[re.Match[str]]:
        """Whole spellings, as `finditer` finds them. Window by window: the interpreter runs no other thread while it
        searches, and 30 MB of beginnings of spellings took it two seconds."""
        at = 0
        while at < len(text):
            end = min(at + WINDOW_CHARS + self._longest, len(text))
            found = self._spelling.search(text, at, end)
            if found is not None and (end == len(text) or found.start() + self._longest <= end):
                yield found
                at = found.end()
            elif end == len(text):
                return
            else:  # what begins near the end of a window may be longer than it
                at = max(at + 1, end - self._longest + 1) if found is None else found.start()


def _free_characters(texts: Iterable[Any]) -> tuple[str, str]:
    used: set[str] = set()
    breakers = re.compile(f"[{_BREAKERS[0]}-{_BREAKERS[-1]}]")
    pending = [(text, 0) for text in texts]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            used.update(breakers.findall(value))
        elif isinstance(value, (dict, list, tuple)):
            if depth == MAX_DEPTH:
                raise InvalidRequest(f"the request nests values deeper than {MAX_DEPTH} levels; flatten it")
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            pending.extend((item, depth + 1) for item in items)
    free = [char for char in _BREAKERS if char not in used]
    if len(free) < 2:
        raise InvalidRequest("the request holds nearly all of the noncharacters U+FDD2 to U+FDEF; leave them out")
    return free[0], free[1]


def escape_non_ascii(text: str) -> str:
    """JSON's \\u escapes for all but ASCII and the breakers: escaped, a breaker would become part of the text."""
    return "".join(char if char.isascii() or char in _BREAKERS else json.dumps(char)[1:-1] for char in text)
