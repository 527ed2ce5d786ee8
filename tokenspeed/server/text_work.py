"""Rendering and tokenizing of long texts, on threads of which long ones hold only some. Knows no wire format.

What runs on a thread cannot be stopped: six texts of 30 MB, whose clients had long gone, kept all threads busy for
minutes. So a text waits here and not in a pool's queue, and whose client has gone meanwhile never starts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from tokenspeed.server.errors import ClientGone

OFF_LOOP_CHARS = 20_000
"""Above this many characters rendering and tokenizing leave the event loop, where they would hold up other streams."""

LONG_CHARS = 1_000_000
"""About 200,000 tokens. Longer texts wait for one another and for nobody else."""

T = TypeVar("T")
P = ParamSpec("P")

serving: ContextVar[Request | None] = ContextVar("serving", default=None)
"""The request whose task this is, from when its body has been read."""


class TextWork:
    """The threads of one server for texts."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._some = asyncio.Semaphore(max(2, cores))
        self._long = asyncio.Semaphore(max(1, cores // 4))

    async def run(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(...)`, on a thread when there are many characters to go through.

        Raises:
            ClientGone: the client went away before its turn came.
        """
        if num_chars <= OFF_LOOP_CHARS:
            return work(*args, **kwargs)
        async with self._long if num_chars > LONG_CHARS else self._some:
            request = serving.get()
            if request is not None and await request.is_disconnected():
                raise ClientGone
            return await asyncio.to_thread(work, *args, **kwargs)
