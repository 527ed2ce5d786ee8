"""How long the JSON text of a schema is, before there is one. No torch."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any

from tokenspeed.grammar.interface import GrammarError


class SchemaSize:
    """Counts characters as `json.dumps` writes them. What several places of a schema share is looked at once: its text
    may be a thousand times what is in memory.

    Args:
        most: of one text.
        refusal: what is told of a longer one.
    """

    def __init__(self, most: int, refusal: str) -> None:
        self._most = most
        self._refusal = refusal
        self._known: dict[int, int] = {}  # by id, of objects that the caller keeps
        self._num_seen = 0

    def of(self, value: Any) -> int:
        """The characters of a JSON value, which has to stay in memory as long as this object.

        Raises:
            GrammarError: more than `most`, found as soon as so many have been seen.
        """
        if isinstance(value, str):
            return self._seen(len(encode_basestring_ascii(value)))
        if not isinstance(value, dict | list | tuple):
            return self._seen(len(json.dumps(value)))
        size = self._known.get(id(value))
        if size is None:
            size = self._seen(2 * max(1, len(value)))  # brackets, and ", " between
            if isinstance(value, dict):
                for key, each in value.items():
                    size += self._seen(len(encode_basestring_ascii(str(key))) + 2) + self.of(each)
            else:
                for each in value:
                    size += self.of(each)
            if size > self._most:
                raise GrammarError(self._refusal)
            self._known[id(value)] = size
        return size

    def _seen(self, num_chars: int) -> int:
        self._num_seen += num_chars
        if self._num_seen > self._most:
            raise GrammarError(self._refusal)
        return num_chars
