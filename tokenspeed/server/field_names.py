"""Errors name the field that the client sent. What all APIs share (sampling, rendering, the engine) calls fields by
their chat names; an API that calls one otherwise says so here, once, around what it shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tokenspeed.protocol.errors import InvalidRequest


@contextmanager
def spoken_as(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused inside is told in these words.

    Args:
        names: chat's name of a field (or `prompt`, what the engine gets) -> this request's.
    Raises:
        InvalidRequest: as inside, renamed.
    """
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error, names) from error.__cause__


def _renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same refusal."""
    param = error.param
    field = re.match(r"\w+", param or "")
    if param is not None and field is not None and field[0] in names:
        new = names[field[0]]
        # Places in a list may differ: one item of an API can be several messages.
        param = new if new == "input" or "[" not in param else new + param[field.end() :]
    return error.spoken_as(names, param)
