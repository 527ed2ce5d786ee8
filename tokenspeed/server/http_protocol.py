"""One HTTP connection: uvicorn's protocol with limits on headers, and errors in OpenAI's shape. Knows no route.

The parser itself sets no limit, and it joins a header from its pieces: an endless one takes all memory, and one of
80 MB stopped the event loop for nine seconds, before any key was asked for. Nor does anything wait for a head with an
end: a connection that sent half of one, or nothing, was kept for ever.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenspeed.server.errors import ErrorBody, ErrorDetail

logger = logging.getLogger("tokenspeed.server")

MAX_HEAD_BYTES = 64 * 1024  # request line and headers, or what follows a chunked body
HEAD_TIMEOUT_S = 30.0  # from a connection's beginning, or a head's first byte, to the head's end


class HttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head passes MAX_HEAD_BYTES (431) or takes longer than HEAD_TIMEOUT_S (408). A head that
    comes whole in one read always passes. A body may take its time: clients on slow lines send long ones."""

    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

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

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, "Bad Request", msg)

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = msgspec.json.encode(ErrorBody(ErrorDetail(message=message, type="invalid_request_error")))
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, phrase.encode(), len(body), body)
        )
        self.transport.close()
