"""Token ids to text as they come: never part of a character, final once given, O(1) a token.

Works on the tokens' bytes, like `Tokenizer.decode`, so that for any split of the ids the pieces joined equal `decode`
of all of them. Knows nothing of stop strings (`text.stop`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What a detokenizer needs of `codec.Tokenizer`."""

    special_ids: frozenset[int]

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """One sequence's text.

    Args:
        skip_special_tokens: leave special tokens out.
        continues: the text goes on from a prompt, so its first space is the model's own and stays. Only SentencePiece
            vocabularies have a first space to drop; with False the joined text equals `decode` there too.
    """

    def __init__(self, tokenizer: Decodes, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._at_start = tokenizer.strips_leading_space and not continues
        # Holds back the bytes of an unfinished character, at most three.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids, give the text that is certain now."""
        spell, skip = self._tokenizer.token_bytes, self._skip
        raw = b"".join([spell(token_id) for token_id in token_ids if token_id not in skip])
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The sequence has ended: an unfinished character becomes U+FFFD. Nothing may be fed after it."""
        return self._utf8.decode(b"", final=True)
