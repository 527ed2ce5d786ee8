"""Errors in Anthropic's shape: {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from tokenspeed.protocol.errors import InvalidRequest, Overloaded, TokenSpeedError
from tokenspeed.server.errors import ClientGone, describe, error_headers
from tokenspeed.server.responses import json_response

logger = logging.getLogger("tokenspeed.server")

OVERLOADED = 529  # Anthropic's own status, which its SDKs wait for and try again

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's envelope."""

    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def to_error(error: Exception) -> tuple[int, AnthropicError]:
    """The HTTP status and wire form of any exception."""
    status, detail = describe(error)
    if isinstance(error, Overloaded) and error.draining:
        status = OVERLOADED
    message = detail.message
    if isinstance(error, InvalidRequest) and error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by these words agents know that they have to compact
    return status, AnthropicError(error=AnthropicErrorDetail(type=_TYPES.get(status, "api_error"), message=message))


def error_response(error: Exception) -> Response:
    """A whole HTTP response for an exception."""
    status, body = to_error(error)
    return json_response(body, status, error_headers(error))


def unauthorized(message: str) -> Response:
    """The response to a request without a valid key."""
    body = AnthropicError(error=AnthropicErrorDetail(type="authentication_error", message=message))
    return json_response(body, 401, {"www-authenticate": "Bearer"})


def encode_error(error: Exception) -> bytes:
    """The JSON body of an exception."""
    return msgspec.json.encode(to_error(error)[1])


def error_event(error: Exception) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"event: error\ndata: " + encode_error(error) + b"\n\n"


def answer_error(error: Exception) -> Response:
    """What an endpoint answers for an exception of its own. What is no TokenSpeedError is a bug, and logged as one."""
    if isinstance(error, ClientGone):
        raise error
    if not isinstance(error, TokenSpeedError):
        logger.error("a request failed", exc_info=error)
    return error_response(error)
