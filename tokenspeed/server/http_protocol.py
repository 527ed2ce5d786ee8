"""One HTTP connection: uvicorn's protocol with limits on heads and slow bodies, errors in OpenAI's shape. No routes.

The parser itself sets no limit, and it joins a header from its pieces: an endless one takes all memory, and one of
80 MB stopped the event loop for nine seconds, before any key was asked for. Nor does anything wait for a head with an
end: a connection that sent half of one, or nothing, was kept for ever, and so was one that sent its body drop by drop.

Of pipelined requests uvicorn tells only the last that the connection is lost: the one before went on answering, into a
closed socket. To HTTP/1.0, which knows no chunks, it sends chunks all the same.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenspeed.server.errors import ErrorBody, ErrorDetail

logger = logging.getLogger("tokenspeed.server")

MAX_HEAD_BYTES = 64 * 1024  # request line and headers, or what follows a chunked body
HEAD_TIMEOUT_S = 30.0  # from a connection's beginning, or a head's first byte, to the head's end
BODY_TIMEOUT_S = 60.0  # from a head's end to the body's, and a second more for every
BODY_BYTES_PER_S = 8 * 1024  # that have come: clients on slow lines send long bodies


class HttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head passes MAX_HEAD_BYTES (431) or takes longer than HEAD_TIMEOUT_S (408), or whose body
    takes longer than its size allows (408). A head that comes whole in one read always passes."""

    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _num_body_bytes: int | None = None  # None: no body is awaited
    _body_since_s = 0.0
    _body_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None  # others wait behind it; `cycle` is the last one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_body_timer()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)  # which sets the count to 0 wherever a head ends or a body goes on
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            logger.warning("refused a request with more than %d bytes of headers", MAX_HEAD_BYTES)
            self._refuse(
                431,
                "Request Header Fields Too Large",
                f"the request's headers are longer than {MAX_HEAD_BYTES} bytes; send less",
            )
        if self._num_head_bytes == 0 or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._await_head()
        if self._num_body_bytes is None or self.transport.is_closing():
            self._stop_body_timer()
        elif self._body_timer is None:  # most bodies come whole, in one read with their head
            self._await_body(BODY_TIMEOUT_S)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        cycle = self.cycle
        is_answering = (
            cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        )
        if is_answering:
            self._await_head()  # the request before; meanwhile nothing may be written here
        elif not self._num_head_bytes:
            self.transport.close()
        elif not self.transport.is_closing():
            said = f"the request's headers took longer than {HEAD_TIMEOUT_S:g} s"
            self._refuse(408, "Request Timeout", said)

    def _await_body(self, delay_s: float) -> None:
        self._body_timer = self.loop.call_later(delay_s, self._body_is_late)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_is_late(self) -> None:
        self._body_timer = None
        if self._num_body_bytes is None or self.transport.is_closing():
            return
        now_s = self.loop.time()
        if self.flow.read_paused or self.pipeline:
            # It waits for this server: for room, or for the answer before, into which nothing may be written.
            self._body_since_s = now_s
        left_s = self._body_since_s + BODY_TIMEOUT_S + self._num_body_bytes / BODY_BYTES_PER_S - now_s
        if left_s > 0:
            self._await_body(left_s)
        elif self.cycle is not None and self.cycle.response_started:
            self.transport.close()  # the answer did not need it
        else:
            logger.warning("refused a request whose body was too slow: %d bytes so far", self._num_body_bytes)
            self._refuse(
                408,
                "Request Timeout",
                f"the request's body took longer than {BODY_TIMEOUT_S:g} s and a second more for every "
                f"{BODY_BYTES_PER_S} bytes; send it faster",
            )

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._body_since_s = self.loop.time()
        self._stop_body_timer()  # of the body before, which ended in the same read
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        self._num_body_bytes = (self._num_body_bytes or 0) + len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        self._num_body_bytes = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, "Bad Request", msg)

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        if self.transport.is_closing():
            return
        answering = self._answering
        if answering is not None and answering.response_started and not answering.response_complete:
            self.transport.close()  # it would come out in the middle of the answer before
            return
        body = msgspec.json.encode(ErrorBody(ErrorDetail(message=message, type="invalid_request_error")))
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, phrase.encode(), len(body), body)
        )
        self.transport.close()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """An answer of unknown length ends where the connection does."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def sent(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open:
                cycle.expected_content_length = len(message.get("body", b""))  # whatever comes is right
            await send(message)

        await app(scope, receive, sent)

    return plain
