"""How much there is in a JSON body, told before it is parsed: Python's parser stops every other thread while it runs,
and the endpoint walks what it made. 15 MB of small containers stopped a server for nine seconds.

Counted on the bytes, outside of strings. Knows no endpoint and no field.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenspeed.protocol.errors import InvalidRequest

MAX_PARTS = 200_000
"""Objects, arrays and members of objects. A conversation of 1,000 turns with 100 tools has about 20,000."""

MAX_ITEMS = 2_500_000
"""Items of arrays and members of objects: prompts of token ids are lists of numbers."""

_CHUNK_BYTES = 2**20

_QUOTE, _COMMA = ord('"'), ord(",")
_PART_MARKS = tuple(map(ord, "[{:"))


def check_size(body: bytes) -> None:
    """Refuse what holds more than a request needs.

    Raises:
        InvalidRequest: naming the number and the limit.
    """
    # Marks inside of strings count too here: an upper bound, which nearly every body keeps.
    if sum(body.count(mark) for mark in b"[{:") <= MAX_PARTS and body.count(b",") <= MAX_ITEMS:
        return
    num_parts, num_items = _outside_strings(body)
    if num_parts > MAX_PARTS:
        raise InvalidRequest(
            f"the body holds {num_parts} objects, arrays and fields, the limit is {MAX_PARTS}; send it as several "
            "requests"
        )
    if num_items > MAX_ITEMS:
        raise InvalidRequest(
            f"the body holds {num_items} values, the limit is {MAX_ITEMS}; send it as several requests"
        )


def _outside_strings(body: bytes) -> tuple[int, int]:
    """(marks that begin parts, commas). Of what is no JSON, something."""
    # Pairs of backslashes first, from the left, as a parser reads them; what is left before a quote escapes it.
    plain = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    num_parts = num_commas = 0
    is_inside = False
    for start in range(0, len(plain), _CHUNK_BYTES):
        chunk: npt.NDArray[np.uint8] = np.frombuffer(plain, np.uint8, min(_CHUNK_BYTES, len(plain) - start), start)
        quotes = np.cumsum(chunk == _QUOTE, dtype=np.uint8) + np.uint8(is_inside)
        outside = chunk[(quotes & 1) == 0]
        num_parts += sum(int(np.count_nonzero(outside == mark)) for mark in _PART_MARKS)
        num_commas += int(np.count_nonzero(outside == _COMMA))
        is_inside = bool(quotes[-1] & 1)
    return num_parts, num_commas
