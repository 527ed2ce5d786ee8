"""Well-formed UTF-8, token by token: what may come next besides what a grammar says. No library, no torch.

A library may take any lead byte with any continuation bytes for a character: encoded surrogates (ED A0..BF), overlong
forms (E0 80..9F, F0 80..8F) and what is beyond U+10FFFF (F4 90..BF). The decoder turns each byte of them into a
character of its own, so limits on length and patterns would not hold. Sequences: Unicode 15, table 3-7.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.interface import Vocabulary

START = 0
"""The state between two characters; the others are inside of one."""

_DEAD = 8
_CONTINUATION = (0x80, 0xC0)
_LEADS = (
    (0x00, 0x80, START),
    (0xC2, 0xE0, 1),
    (0xE0, 0xE1, 4),
    (0xE1, 0xED, 2),
    (0xED, 0xEE, 5),
    (0xEE, 0xF0, 2),
    (0xF0, 0xF1, 6),
    (0xF1, 0xF4, 3),
    (0xF4, 0xF5, 7),
)
"""First byte, byte behind the last, state behind them. States 1 to 3: so many bytes are missing."""

_SECONDS = {
    1: (*_CONTINUATION, START),
    2: (*_CONTINUATION, 1),
    3: (*_CONTINUATION, 2),
    4: (0xA0, 0xC0, 1),
    5: (0x80, 0xA0, 1),
    6: (0x90, 0xC0, 2),
    7: (0x80, 0x90, 2),
}


class WellFormed:
    """Where each token leads, for one vocabulary.

    Fields:
        masks: what may come in each of the 8 states, [8, ceil(V / 32)] int32, a bit a token. Special tokens and those
            without bytes may come between characters alone.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = _ends(vocabulary.text_tokens())
        bits = np.zeros((_DEAD, 32 * vocabulary.num_words), dtype=np.uint8)
        bits[:, : ends.shape[1]] = ends != _DEAD
        self.masks: NDArray[np.int32] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._ends = [row.tobytes() for row in ends]

    def behind(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None: it may not come."""
        end = self._ends[state][token_id]
        return None if end == _DEAD else end


def _ends(tokens: list[bytes]) -> NDArray[np.uint8]:
    """The state behind each token in each state, [8, V]."""
    table = np.full((_DEAD + 1, 256), _DEAD, dtype=np.uint8)
    for first, behind, state in _LEADS:
        table[START, first:behind] = state
    for before, (first, behind, state) in _SECONDS.items():
        table[before, first:behind] = state
    text = np.frombuffer(b"".join(tokens), dtype=np.uint8)
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    ends = np.full((_DEAD, len(tokens)), _DEAD, dtype=np.uint8)
    ends[START] = START
    with_bytes = np.flatnonzero(lengths)
    ends[:, with_bytes] = np.arange(_DEAD, dtype=np.uint8)[:, None]
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        ends[:, longer] = table[ends[:, longer], text[starts[longer] + place]]
    return ends
