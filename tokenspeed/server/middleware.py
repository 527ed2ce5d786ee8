"""Pure ASGI middleware: keys and the body's size limit. (CORS is Starlette's own, pure ASGI as well.)

Nothing here wraps `send`, so a streamed token costs these layers nothing and a disconnect reaches the endpoint.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.server.anthropic import errors as anthropic
from tokenspeed.server.errors import ErrorBody, ErrorDetail, PayloadTooLarge, error_response
from tokenspeed.server.responses import json_response

# Probes and scrapers come without keys.
OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/version", "/metrics"})
HEAD_PATHS = OPEN_PATHS | {"/v1/models"}


class ApiKeyMiddleware:
    """Refuses with 401 unless `Authorization: Bearer KEY` or `x-api-key: KEY` names one of the keys.

    Compares in constant time.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        await _unauthorized(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, bearer = (_header(scope, b"authorization") or b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []
        if (own := _header(scope, b"x-api-key")) is not None:
            given.append(own)
        allowed = False
        for one in given:
            for key in self._keys:  # every key is compared, so the time tells nothing of which one was near
                allowed |= hmac.compare_digest(one.strip(), key)
        return allowed


class HeadMiddleware:
    """Answers HEAD where monitors ask it, as GET; the HTTP server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] in HEAD_PATHS:
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses with 413: before reading when Content-Length tells, while reading when the body is chunked."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit():
            if int(length) > self._max_bytes:
                respond = anthropic.error_response if anthropic.speaks_anthropic(scope["path"]) else error_response
                await respond(self._too_large(f"{int(length)} bytes"))(scope, receive, send)
                return
            await self._app(scope, receive, send)  # the HTTP parser holds the client to its Content-Length
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large(f"more than {self._max_bytes} bytes")
            return message

        return counted

    def _too_large(self, size: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body is {size}, the limit is {self._max_bytes}; send less, or raise the server's body limit"
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            assert isinstance(value, bytes)
            return value
    return None


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "this server asks for a key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY' with one given to "
        "--api-key"
    )
    if anthropic.speaks_anthropic(scope["path"]):
        await anthropic.unauthorized(message)(scope, receive, send)
        return
    detail = ErrorDetail(
        message=message,
        type="invalid_request_error",
        code="invalid_api_key",
    )
    response = json_response(ErrorBody(detail), 401, {"www-authenticate": "Bearer"})
    await response(scope, receive, send)
