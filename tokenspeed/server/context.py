"""What every endpoint of one server shares, and how a request becomes events. Knows no wire format.

`generate` is the only place that talks to the engine for tokens: it meters, merges several prompts, closes the engine's
iterators when its reader stops, and turns bad ends into exceptions.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import EngineClient, GenerationEvent, GenerationRequest
from tokenspeed.protocol.errors import EngineDead, InvalidRequest, Overloaded
from tokenspeed.protocol.grammar import INVALID_GRAMMAR
from tokenspeed.server.errors import DEAD_MESSAGE, GenerationFailed, ModelNotFound
from tokenspeed.server.formats import Formats
from tokenspeed.server.metrics import Metrics, RequestMeter
from tokenspeed.server.text_work import OFF_LOOP_CHARS, TextWork

logger = logging.getLogger("tokenspeed.server")

CHECK_OFF_LOOP_CHARS = 500
"""Of the schemas of one request. What shorter ones can ask for takes a millisecond or two."""

T = TypeVar("T")
P = ParamSpec("P")


async def off_loop(num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, on another thread when there are many characters (or tokens) to go through. Not for what takes
    seconds: see `TextWork`."""
    if num_chars > OFF_LOOP_CHARS:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


async def check_off_loop(num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` that checks and rewrites schemas, on another thread unless they are short: a thousand characters can
    ask for as many comparisons as a hundred thousand (`grammar.budget`), 0.1 s of them."""
    if num_chars > CHECK_OFF_LOOP_CHARS:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


@dataclass(slots=True)
class ServerContext:
    """One server: its engine, its configuration and what it has counted.

    Fields:
        formats: how the model writes reasoning and tool calls.
        texts: where long texts are rendered and tokenized.
        live_ids: ids of running requests, so that a client's own id is refused while one like it runs.
    """

    client: EngineClient
    config: ServerConfig
    metrics: Metrics
    formats: Formats = field(default_factory=Formats)
    created: int = field(default_factory=lambda: int(time.time()))
    texts: TextWork = field(default_factory=TextWork)
    live_ids: set[str] = field(default_factory=set)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is None or served."""
        if name is not None and name not in self.config.served_model_names:
            served = ", ".join(repr(known) for known in self.config.served_model_names)
            raise ModelNotFound(f"the model {name[:200]!r} is not served here; served: {served}")

    def check_accepting(self) -> None:
        """Raise EngineDead or Overloaded before any work is spent on a request that cannot run."""
        if not self.client.is_alive:
            raise EngineDead(DEAD_MESSAGE)
        if self.client.is_draining:
            raise Overloaded("the server is shutting down; send the request again later", 5, draining=True)

    def claim_id(self, prefix: str, given: str | None) -> str:
        """An id that no running request has: the given one, or a new `prefix-<32 hex>`. Give it back by release_id."""
        if given is not None and given in self.live_ids:
            raise InvalidRequest(f"request_id {given!r} is still running; ids must be unique", param="request_id")
        request_id = given if given is not None else f"{prefix}-{uuid.uuid4().hex}"
        self.live_ids.add(request_id)
        return request_id

    def release_id(self, request_id: str) -> None:
        """Allow the id again."""
        self.live_ids.discard(request_id)


def _never() -> bool:
    return False


async def generate(
    context: ServerContext, requests: list[GenerationRequest], is_done: Callable[[], bool] = _never
) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
    """Events of one or several prompts as they come, each with its prompt's number. Closing it aborts what still runs.

    Args:
        is_done: with one prompt: asked behind each event; True = its reader has all it wants, what still runs is ended.

    Raises:
        InvalidRequest, Overloaded, EngineDead: from the client, before the first event of that prompt. InvalidRequest
            also later, when the request's own grammar cannot be followed any further.
        GenerationFailed: a sequence ended in an error, or without an end.
    """
    if len(requests) == 1:
        async with aclosing(_metered(context, requests[0], is_done)) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GenerationEvent] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(context, number, request, queue)) for number, request in enumerate(requests)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    context: ServerContext,
    number: int,
    request: GenerationRequest,
    queue: asyncio.Queue[tuple[int, GenerationEvent] | Exception | None],
) -> None:
    try:
        async with aclosing(_metered(context, request)) as events:
            async for event in events:
                queue.put_nowait((number, event))
    except Exception as error:  # raised again by the reader, whose request it ends
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def _metered(
    context: ServerContext, request: GenerationRequest, is_done: Callable[[], bool] = _never
) -> AsyncGenerator[GenerationEvent, None]:
    """One engine request: counted, logged, closed, and never ending without an end."""
    meter = RequestMeter(context.metrics, request.sampling.n)
    num_open = request.sampling.n
    events = context.client.generate(request)
    outcome = "abort"  # what a reader that stops reading leaves behind
    try:
        async for event in events:
            meter.note(event)
            if event.finish_reason == "error":
                outcome = "error"
                if event.error_code == INVALID_GRAMMAR and request.grammar is not None:
                    raise InvalidRequest(event.error or "", param=request.grammar.param, code=event.error_code)
                raise _failure(context, event.error or "the engine gave no reason")
            if event.finish_reason is not None:
                num_open -= 1
                outcome = event.finish_reason if num_open == 0 else outcome
            yield event
            if num_open == 0:
                return
            if is_done():
                outcome = "stop"
                return
        outcome = "error"
        raise _failure(context, "the engine ended the stream without a finish reason")
    except (InvalidRequest, Overloaded, EngineDead):
        outcome = "refused"
        raise
    except Exception:
        outcome = "error"
        raise
    finally:
        await close(events, context.client, request.request_id)
        meter.close(outcome)
        if context.config.log_requests:
            _log(request, meter, outcome)


async def close(events: AsyncIterator[GenerationEvent], client: EngineClient, request_id: str) -> None:
    """Close the client's iterator, which aborts the engine's request when it still runs."""
    if isinstance(events, AsyncGenerator):
        await events.aclose()
    else:
        client.abort(request_id)


def _failure(context: ServerContext, message: str) -> GenerationFailed:
    is_going = context.client.is_draining or not context.client.is_alive
    return GenerationFailed(message, 503 if is_going else 500)


def _log(request: GenerationRequest, meter: RequestMeter, outcome: str) -> None:
    first = f"{meter.first_token_s * 1000:.1f}" if meter.first_token_s is not None else "-"
    logger.info(
        "Req: %s Finish! outcome=%s prompt_tokens=%d cache_tokens=%d output_tokens=%d ttft_ms=%s total_ms=%.1f",
        request.request_id,
        outcome,
        len(request.prompt_token_ids),
        meter.num_cached_tokens,
        meter.num_output_tokens,
        first,
        meter.elapsed_s * 1000,
    )
