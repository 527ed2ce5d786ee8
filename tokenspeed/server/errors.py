"""Errors on the wire, in OpenAI's shape, each with the right status. Knows no endpoint.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.protocol.echo import cut
from tokenspeed.protocol.errors import EngineDead, InvalidRequest, Overloaded, TokenSpeedError
from tokenspeed.server.responses import json_response

logger = logging.getLogger("tokenspeed.server")

DEAD_MESSAGE = "the engine process has died; the server is shutting down and has to be started again"


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong. `param` is the field at fault; `code` a short machine-readable word."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's envelope."""

    error: ErrorDetail


class ModelNotFound(TokenSpeedError):
    """`model` names nothing that is served here (404)."""


class PayloadTooLarge(TokenSpeedError):
    """The body passes the size limit (413)."""


class GenerationFailed(TokenSpeedError):
    """A request that the engine took and could not finish.

    Args:
        status: 500 when this request alone failed, 503 when the server is going away.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client closed its connection. Nobody reads the answer; it only unwinds the work."""


def describe(error: Exception) -> tuple[int, ErrorDetail]:
    """The HTTP status and wire form of any exception. An unknown one is a bug of ours and says no more than that."""
    match error:
        case InvalidRequest():
            return 400, ErrorDetail(
                message=error.message, type="invalid_request_error", param=error.param, code=error.code
            )
        case ModelNotFound():
            return 404, ErrorDetail(
                message=str(error), type="invalid_request_error", param="model", code="model_not_found"
            )
        case PayloadTooLarge():
            return 413, ErrorDetail(message=str(error), type="invalid_request_error", code="request_too_large")
        case Overloaded(draining=True):
            return 503, ErrorDetail(message=error.message, type="service_unavailable", code="draining")
        case Overloaded():
            return 429, ErrorDetail(message=error.message, type="rate_limit_error", code="queue_full")
        case EngineDead():
            return 503, ErrorDetail(message=str(error) or DEAD_MESSAGE, type="service_unavailable", code="engine_dead")
        case GenerationFailed():
            kind = "service_unavailable" if error.status == 503 else "server_error"
            return error.status, ErrorDetail(message=str(error), type=kind, code="generation_failed")
        case HTTPException():
            phrase = HTTPStatus(error.status_code).name.lower()
            return error.status_code, ErrorDetail(message=str(error.detail), type="invalid_request_error", code=phrase)
        case _:
            return 500, ErrorDetail(
                message="internal error; the server's log has the details", type="server_error", code="internal_error"
            )


def encode_error(error: Exception) -> bytes:
    """The JSON body of an exception, for a response or an SSE event."""
    return msgspec.json.encode(ErrorBody(describe(error)[1]))


def error_response(error: Exception) -> Response:
    """A whole HTTP response for an exception, Retry-After included."""
    status, detail = describe(error)
    return json_response(ErrorBody(detail), status, error_headers(error))


def error_headers(error: Exception) -> dict[str, str]:
    """The headers that an exception's response needs, whatever its body's shape."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, error.retry_after_s))
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if isinstance(error, PayloadTooLarge):
        headers["connection"] = "close"  # the rest of the body is never read
    return headers


def install_handlers(app: FastAPI, respond: Callable[[str, Exception], Response]) -> None:
    """Answer every exception that leaves an endpoint.

    Args:
        respond: the response for a path's exception, in the shape that the path speaks.
    """

    async def known(request: Request, error: Exception) -> Response:
        return respond(request.url.path, error)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and error.detail == "Not Found":
            error.detail = f"there is no {request.method} {cut(request.url.path)} here; /openapi.json lists the routes"
        if error.status_code == 405 and error.detail == "Method Not Allowed":
            allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow", "another method")
            error.detail = f"{cut(request.url.path)} takes {allowed}, not {request.method}"
        return respond(request.url.path, error)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(TokenSpeedError, known)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(ClientGone, gone)
    # Starlette sends this answer, then raises the exception again so that the server logs its traceback.
    app.add_exception_handler(Exception, known)
