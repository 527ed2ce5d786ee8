"""POST /v1/responses: from a request to a response, whole or as typed events."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from tokenspeed.protocol.errors import InvalidRequest, TokenSpeedError
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, check_off_loop
from tokenspeed.server.errors import describe, encode_error
from tokenspeed.server.field_names import spoken_as
from tokenspeed.server.openai.fields import check_priority, to_sampling
from tokenspeed.server.rendering import Conversation, num_chars
from tokenspeed.server.responses import json_response
from tokenspeed.server.responses_api.conversation import to_keep, to_messages
from tokenspeed.server.responses_api.events import Event, ResponseWriter, sse, to_usage
from tokenspeed.server.responses_api.items import Item
from tokenspeed.server.responses_api.namespaces import Function, choice_among, functions_of, namespaced
from tokenspeed.server.responses_api.request import (
    CARRIED_REASONING,
    FIELD_NAMES,
    ResponsesRequest,
    chat_tools,
    generation_fields,
    parse,
    to_grammar,
)
from tokenspeed.server.responses_api.response import ReasoningConfig, ResponseObject, TextConfig
from tokenspeed.server.responses_api.store import ResponseStore, StoredResponse
from tokenspeed.server.schema import documented
from tokenspeed.server.turn import TurnRequest, prepare_turn
from tokenspeed.server.turn_news import News, event_stream, turn_news, whole_answer

logger = logging.getLogger("tokenspeed.server")

WIRE_TYPES = (ResponsesRequest, ResponseObject)


def router(context: ServerContext, store: ResponseStore) -> APIRouter:
    """The endpoint, bound to a server and to where its responses are kept."""
    routes = APIRouter()

    @routes.post("/v1/responses", **documented("OpenAI", ResponsesRequest, ResponseObject, streams=True))
    async def create_response(request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of typed events."""
        context.check_accepting()
        body = parse(await read_json(request))
        context.check_model(body.model)
        with spoken_as(FIELD_NAMES):
            return await respond(request, body)

    async def respond(request: Request, body: ResponsesRequest) -> Response:
        previous = _previous(store, body.previous_response_id)
        earlier: list[Item] = previous.conversation() if previous is not None else []
        fields = generation_fields(body)
        priority = check_priority(fields, context.config.allow_priority)
        sampling = to_sampling(
            fields, context.client.model_config, max_tokens=body.max_output_tokens, logprobs=None, prompt_logprobs=None
        )
        functions = functions_of(body.tools or ())
        schema = body.text.format.schema if body.text is not None else None
        asked = await check_off_loop(num_chars(schema), _turn_request, body, functions, earlier)
        turn = await prepare_turn(context, asked, sampling)
        response_id = context.claim_id("resp", f"resp_{uuid.uuid4().hex}")
        job = turn.generation(response_id, priority, body.cache_salt)
        shell = _shell(response_id, context.model_name, body, sampling)
        writer = ResponseWriter(shell, CARRIED_REASONING in (body.include or ()), namespaced(functions))

        def keep(response: ResponseObject) -> None:
            if response.store and not store.put(response, to_keep(body.input), previous):
                logger.warning("response %s is too large to be kept", response.id)

        news = turn_news(context, job, turn.reader())
        headers = {"x-request-id": response_id}
        if body.stream:
            return await event_stream(request, _events(news, writer, keep), encode_error, headers)
        return json_response(await whole_answer(request, _whole(news, writer, keep)), headers=headers)

    return routes


def _previous(store: ResponseStore, response_id: str | None) -> StoredResponse | None:
    if response_id is None:
        return None
    previous = store.get(response_id)
    if previous is None:
        raise InvalidRequest(
            f"previous_response_id is {response_id[:100]!r}, which is not kept here; responses are kept in memory "
            "until newer ones need the room, unless store is false: send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous


def _turn_request(body: ResponsesRequest, functions: list[Function], earlier: list[Item]) -> TurnRequest:
    messages = to_messages([*earlier, *body.input], body.instructions, len(earlier))
    return TurnRequest(
        conversation=Conversation(
            messages=messages,
            tools=chat_tools(functions),
            template_kwargs=body.chat_template_kwargs or {},
        ),
        choice=choice_among(body.tool_choice, functions),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        grammar=to_grammar(body.text),
        yields_to_tools=True,
        strict_tools=frozenset(each.flat_name for each in functions if each.tool.strict),
    )


def _shell(response_id: str, model_name: str, body: ResponsesRequest, sampling: SamplingParams) -> ResponseObject:
    """The response before anything was generated."""
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model_name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or ReasoningConfig(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=sampling.temperature,
        text=body.text or TextConfig(),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


async def _events(
    news: AsyncGenerator[News, None], writer: ResponseWriter, keep: Callable[[ResponseObject], None]
) -> AsyncGenerator[bytes, None]:
    """The response's events. Before the first, errors are raised; then they are its last event."""
    is_first = True
    try:
        async with aclosing(news):
            async for each in news:
                events = writer.start() if is_first else []
                events += writer.feed(each.deltas)
                if each.finish_reason is not None:
                    events += _finish(each, writer)
                    keep(writer.response)
                is_first = False
                yield sse(events)
    except Exception as error:
        if is_first:
            raise
        if not isinstance(error, TokenSpeedError):  # a bug of ours; nobody else would log it
            logger.error("a stream failed", exc_info=error)
        # By the code agents know whether to try again.
        code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        yield sse(writer.fail(code, describe(error)[1].message))


async def _whole(
    news: AsyncGenerator[News, None], writer: ResponseWriter, keep: Callable[[ResponseObject], None]
) -> ResponseObject:
    async with aclosing(news):
        async for each in news:
            writer.feed(each.deltas)
            if each.finish_reason is not None:
                _finish(each, writer)
    keep(writer.response)
    return writer.response


def _finish(last: News, writer: ResponseWriter) -> list[Event]:
    counts = last.counts
    usage = to_usage(counts.num_prompt, counts.num_cached, counts.num_output, counts.num_reasoning)
    return writer.finish(last.finish_reason == "length", usage)
