"""One turn of one sequence, generated: what `/v1/responses` and `/v1/messages` make their events of. No wire format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.engine.interface import GenerationEvent, GenerationRequest
from tokenspeed.server.context import ServerContext, generate
from tokenspeed.server.errors import ClientGone, GenerationFailed
from tokenspeed.server.responses import ErrorEncoder, EventStream, until_disconnect
from tokenspeed.server.turn_reader import TurnReader
from tokenspeed.text.parsers.interface import Delta
from tokenspeed.text.parsers.output import join_neighbours

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens so far. `num_cached` of the prompt's were in the prefix cache, `num_reasoning` of the output's are
    reasoning."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0


@dataclass(slots=True)
class News:
    """What is new of a turn.

    Fields:
        deltas: in order; may be empty in the first and in the last.
        counts: at its end.
        finish_reason: on the last one: stop, length or tool_calls.
        stop_text: the stop string that ended it.
    """

    deltas: list[Delta] = field(default_factory=list)
    counts: Counts = Counts()
    finish_reason: str | None = None
    stop_text: str | None = None


async def turn_news(context: ServerContext, job: GenerationRequest, reader: TurnReader) -> AsyncGenerator[News, None]:
    """The turn's news as they come; the first at the engine's first event, others when they have something to say and
    as many tokens as `stream_interval` asks. Gives the request's id back, however it ends.

    Args:
        reader: of the job's turn. The job has one sequence.
    Raises:
        InvalidRequest, Overloaded, EngineDead: before the first.
        GenerationFailed: it ended in an error, or was aborted.
    """
    pending, is_first, num_sent = News(), True, 0
    try:
        async with aclosing(generate(context, [job], reader.is_done)) as events:
            async for _, event in events:
                delta = reader.read(event)
                pending.deltas += delta.deltas
                if delta.finish_reason == "abort":
                    raise GenerationFailed("the request was aborted", 503)
                is_last = delta.finish_reason is not None
                is_full = event.num_output_tokens - num_sent >= context.config.stream_interval
                if not (is_first or is_last or (is_full and pending.deltas)):
                    continue
                if is_last:
                    pending.finish_reason = delta.finish_reason
                    pending.stop_text = event.stop_reason if isinstance(event.stop_reason, str) else None
                pending.counts = _counts(event, reader)
                pending.deltas = join_neighbours(pending.deltas)
                yield pending
                pending, is_first, num_sent = News(), False, event.num_output_tokens
    finally:
        context.release_id(job.request_id)


def _counts(event: GenerationEvent, reader: TurnReader) -> Counts:
    return Counts(
        event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens, reader.num_reasoning_tokens
    )


async def event_stream(
    request: Request, stream: AsyncGenerator[bytes, None], encode_error: ErrorEncoder, headers: dict[str, str]
) -> Response:
    """A response of typed events, which end without `[DONE]`. Headers wait for the first: a refusal has its status.

    Args:
        encode_error: not used by a stream that ends in an event of its own whatever happens.
    Raises:
        ClientGone: the client closed its connection; the stream is closed.
    """
    first = await until_disconnect(request.receive, anext(stream))
    if first is None:
        raise ClientGone
    return EventStream(first, stream, encode_error, headers, last=b"")


async def whole_answer(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives.

    Raises:
        ClientGone: the client closed its connection; the work is cancelled.
    """
    answer = await until_disconnect(request.receive, work)
    if answer is None:
        raise ClientGone
    return answer
