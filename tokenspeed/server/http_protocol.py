"""One HTTP connection: uvicorn's protocol with a limit on headers, and errors in OpenAI's shape. Knows no route.

The parser itself sets no limit, and it joins a header from its pieces: an endless one takes all memory, and one of
80 MB stopped the event loop for nine seconds, before any key was asked for.
"""

from __future__ import annotations

import logging

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenspeed.server.errors import ErrorBody, ErrorDetail

logger = logging.getLogger("tokenspeed.server")

MAX_HEAD_BYTES = 64 * 1024  # request line and headers, or what follows a chunked body


class HttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head passes MAX_HEAD_BYTES (431). A head that comes whole in one read always passes."""

    _num_head_bytes = 0

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
