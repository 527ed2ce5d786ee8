"""Errors in Anthropic's shape: {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}"""

from __future__ import annotations

import logging
import uuid
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
    request_id: str


def speaks_anthropic(path: str) -> bool:
    """The path's answers, whatever goes wrong, are in Anthropic's shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def new_request_id() -> str:
    """An id for a request that has none yet: it fails before anything is generated, or counts."""
    return f"req_{uuid.uuid4().hex}"


def to_error(error: Exception, request_id: str) -> tuple[int, AnthropicError]:
    """The HTTP status and wire form of any exception."""
    status, detail = describe(error)
    if isinstance(error, Overloaded) and error.draining:
        status = OVERLOADED
    message = detail.message
    if isinstance(error, InvalidRequest) and error.code == "context_length_exceeded":
        message = _too_long(error)
    kind = _TYPES.get(status, "api_error")
    return status, AnthropicError(error=AnthropicErrorDetail(type=kind, message=message), request_id=request_id)


def _too_long(error: InvalidRequest) -> str:
    """In Anthropic's words: by them agents know whether to ask for less output, and how much less, or to compact."""
    if error.param in ("prompt", "messages"):  # the prompt alone does not fit
        return f"prompt is too long: {error.message}"
    given = error.numbers
    if given is None:
        return error.message
    return (
        f"input length and `max_tokens` exceed context limit: {given.num_prompt} + {given.max_tokens} > "
        f"{given.context_len}, decrease input length or `max_tokens` and try again"
    )


def error_response(error: Exception, request_id: str | None = None) -> Response:
    """A whole HTTP response for an exception; of a request without an id it names a new one."""
    status, body = to_error(error, request_id or new_request_id())
    return json_response(body, status, {**error_headers(error), **id_headers(body.request_id)})


def id_headers(request_id: str) -> dict[str, str]:
    """The headers that name a request; Anthropic's SDKs read `request-id`."""
    return {"x-request-id": request_id, "request-id": request_id}


def unauthorized(message: str) -> Response:
    """The response to a request without a valid key."""
    detail = AnthropicErrorDetail(type="authentication_error", message=message)
    body = AnthropicError(error=detail, request_id=new_request_id())
    return json_response(body, 401, {"www-authenticate": "Bearer", **id_headers(body.request_id)})


def error_event(error: Exception, request_id: str) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"event: error\ndata: " + encode_error(error, request_id) + b"\n\n"


def encode_error(error: Exception, request_id: str) -> bytes:
    """The JSON body of an exception."""
    return msgspec.json.encode(to_error(error, request_id)[1])


def answer_error(error: Exception, request_id: str) -> Response:
    """What an endpoint answers for an exception of its own. What is no TokenSpeedError is a bug, and logged as one."""
    if isinstance(error, ClientGone):
        raise error
    if not isinstance(error, TokenSpeedError):
        logger.error("a request failed", exc_info=error)
    return error_response(error, request_id)
