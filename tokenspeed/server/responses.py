"""Answers as bytes: JSON by msgspec, and server-sent events written straight to ASGI. Knows no endpoint.

A streamed token passes here, so an event is bytes already and costs one `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response of anything msgspec can write."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class ErrorEncoder(Protocol):
    """Turns an exception into the JSON of an error."""

    def __call__(self, error: Exception) -> bytes: ...


class EventStream(Response):
    """An SSE response whose first event exists already, so that errors before it have had their HTTP status.

    Args:
        first: the first bytes (one or more whole events).
        rest: what follows, whole events each. It is closed when the client goes away. When it raises, an error event
            is sent in its place.
        encode_error: writes the error event's JSON.
        headers: beside the usual ones.
        last: what ends the stream, whatever came before.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        encode_error: ErrorEncoder,
        headers: dict[str, str],
        last: bytes = DONE,
    ) -> None:
        super().__init__(
            status_code=200,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type="text/event-stream",
        )
        # A stream has no known length; Response wrote the length of an empty body.
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        self._first = first
        self._rest = rest
        self._encode_error = encode_error
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(wait_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await pump
        finally:
            await _stop(gone)
            await _stop(pump)
            await self._rest.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        while (event := await self._next()) is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def _next(self) -> bytes | None:
        """The next event; an error in its place when there is none because of one; None at the end."""
        try:
            return await anext(self._rest, None)
        except Exception as error:  # whatever ends a stream early must still reach its reader; the next call gives None
            return b"data: " + self._encode_error(error) + b"\n\n"


async def wait_disconnected(receive: Receive) -> None:
    """Return when the client has gone. Call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await `work`, but cancel it when the client goes away; then the result is None and nobody reads it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _stop(gone)
        await _stop(task)


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until its cleanup has run. Its own outcome was taken before, or no longer matters."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # marks it as seen
