"""From events to an HTTP response, whole or streamed, for both endpoints. Owns the request's one end: closed iterators,
the released id and the watch for a client that goes away.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.engine.interface import GenerationEvent
from tokenspeed.protocol.errors import TokenSpeedError
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import ClientGone, encode_error
from tokenspeed.server.openai.fields import GenerationFields
from tokenspeed.server.openai.streaming import StreamRules, Writer, chunks
from tokenspeed.server.openai.usage import Usage, UsageMeter
from tokenspeed.server.responses import EventStream, json_response, until_disconnect

logger = logging.getLogger("tokenspeed.server")


class Reply(Protocol):
    """An endpoint's wire format, both ways of answering."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that were reasoning, so far."""
        ...

    def writer(self, rules: StreamRules) -> Writer:
        """For an answer in chunks."""
        ...

    def note(self, prompt: int, event: GenerationEvent) -> None:
        """Collect an event for the whole answer."""
        ...

    def whole(self, usage: Usage) -> Any:
        """The whole answer as something msgspec can write."""
        ...


def stream_rules(context: ServerContext, fields: GenerationFields, wants_logprobs: bool) -> StreamRules:
    """How the request wants its chunks."""
    options = fields.stream_options
    return StreamRules(
        n=fields.n or 1,
        interval=context.config.stream_interval,
        is_plain=not wants_logprobs and not fields.return_token_ids,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


async def answer(
    context: ServerContext,
    request: Request,
    request_id: str,
    events: AsyncGenerator[tuple[int, GenerationEvent], None],
    reply: Reply,
    rules: StreamRules | None,
) -> Response:
    """Stream by `rules`, or collect when they are None. Headers wait for the first event: a refusal has its status.

    Raises:
        ClientGone: the client closed its connection; everything is already closed.
        InvalidRequest, Overloaded, EngineDead, GenerationFailed: see `context.generate`.
    """
    headers = {"x-request-id": request_id}

    def release() -> None:
        context.release_id(request_id)

    if rules is None:
        try:
            usage = await until_disconnect(request.receive, _collect(events, reply))
        finally:
            release()
        if usage is None:
            raise ClientGone
        return json_response(reply.whole(usage), headers=headers)
    stream = chunks(events, reply.writer(rules), rules, release)
    first = await until_disconnect(request.receive, anext(stream))
    if first is None:
        raise ClientGone
    return EventStream(first, stream, _encode_stream_error, headers)


def _encode_stream_error(error: Exception) -> bytes:
    if not isinstance(error, TokenSpeedError):  # a bug of ours; after the headers nobody else would log it
        logger.error("a stream failed", exc_info=error)
    return encode_error(error)


async def _collect(events: AsyncGenerator[tuple[int, GenerationEvent], None], reply: Reply) -> Usage:
    meter = UsageMeter()
    async with aclosing(events):
        async for prompt, event in events:
            meter.note(prompt, event)
            reply.note(prompt, event)
    return meter.usage(reply.num_reasoning_tokens)
