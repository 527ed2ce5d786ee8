"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes, both ways."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.protocol.errors import TokenSpeedError
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.server.anthropic.conversation import chat_tools, to_messages
from tokenspeed.server.anthropic.errors import (
    AnthropicError,
    answer_error,
    encode_error,
    error_event,
    id_headers,
    new_request_id,
)
from tokenspeed.server.anthropic.events import Event, MessageObject, MessageWriter, StopDelta, sse, to_usage
from tokenspeed.server.anthropic.request import FIELD_NAMES, MessagesRequest, PromptFields, parse, parse_count
from tokenspeed.server.body import read_json
from tokenspeed.server.context import ServerContext, check_off_loop
from tokenspeed.server.field_names import spoken_as
from tokenspeed.server.openai.fields import GenerationFields, to_sampling
from tokenspeed.server.rendering import Conversation, num_chars
from tokenspeed.server.responses import json_response
from tokenspeed.server.schema import documented
from tokenspeed.server.turn import ToolChoice, TurnRequest, count_prompt, prepare_turn
from tokenspeed.server.turn_news import News, event_stream, turn_news, whole_answer

logger = logging.getLogger("tokenspeed.server")

_ANY_SCHEMA = GrammarSpec(kind="json_schema", text="{}")

Endpoint = Callable[[Request, str], Awaitable[Response]]


class TokenCount(msgspec.Struct, kw_only=True):
    """How long a prompt is."""

    input_tokens: int


WIRE_TYPES = (MessagesRequest, MessageObject, PromptFields, TokenCount, AnthropicError)


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()

    async def create(request: Request, message_id: str) -> Response:
        context.check_accepting()
        body = parse(await read_json(request))
        context.check_model(body.model)
        with spoken_as(FIELD_NAMES):
            return await respond(request, body, message_id)

    async def respond(request: Request, body: MessagesRequest, message_id: str) -> Response:
        sampling = _sampling(context, body)
        given = body.output_config.format if body.output_config is not None else None
        grammar = await check_off_loop(0 if given is None else num_chars(given.schema), _grammar, body)
        turn = await prepare_turn(context, _turn_request(body, grammar), sampling)
        context.claim_id("msg", message_id)
        news = turn_news(context, turn.generation(message_id), turn.reader())
        omits = body.thinking is not None and body.thinking.display == "omitted"
        writer = MessageWriter(message_id, context.model_name, omits)
        headers = id_headers(message_id)
        if body.stream:
            events = _events(news, writer, message_id)
            return await event_stream(request, events, lambda error: encode_error(error, message_id), headers)
        return json_response(await whole_answer(request, _whole(news, writer)), headers=headers)

    async def count(request: Request, request_id: str) -> Response:
        body = parse_count(await read_json(request))
        context.check_model(body.model)
        # Whether there is a schema may decide how the prompt ends, and which one does not.
        turn = _turn_request(body, _ANY_SCHEMA if _has_format(body) else None)
        counted = TokenCount(input_tokens=await count_prompt(context, turn))
        return json_response(counted, headers=id_headers(request_id))

    @routes.post(
        "/v1/messages",
        **documented("Anthropic", MessagesRequest, MessageObject, streams=True, error=AnthropicError),
    )
    async def create_message(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of typed events."""
        return await _in_shape(create, request, f"msg_{uuid.uuid4().hex}")

    @routes.post("/v1/messages/count_tokens", **documented("Anthropic", PromptFields, TokenCount, error=AnthropicError))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation's prompt has."""
        return await _in_shape(count, request, new_request_id())

    return routes


async def _in_shape(endpoint: Endpoint, request: Request, request_id: str) -> Response:
    """The endpoint's answer, or its error's. The id is there before the body is read: a refusal names it, too."""
    try:
        return await endpoint(request, request_id)
    except Exception as error:
        return answer_error(error, request_id)


def _sampling(context: ServerContext, body: MessagesRequest) -> SamplingParams:
    fields = GenerationFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences
    )
    model = context.client.model_config
    return to_sampling(fields, model, max_tokens=body.max_tokens, logprobs=None, prompt_logprobs=None)


def _turn_request(body: PromptFields, grammar: GrammarSpec | None) -> TurnRequest:
    messages = to_messages(body)
    choice = body.tool_choice
    thinking = body.thinking.type if body.thinking is not None else "adaptive"
    config = body.output_config
    return TurnRequest(
        conversation=Conversation(
            messages=messages,
            tools=chat_tools(body.tools or []),
            continue_final_message=messages[-1]["role"] == "assistant",
        ),
        choice=_choice(body),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        thinking=None if thinking == "adaptive" else thinking == "enabled",
        thinking_budget=body.thinking.budget_tokens if body.thinking is not None else None,
        reasoning_effort=config.effort if config is not None else None,
        grammar=grammar,
        yields_to_tools=True,
        strict_tools=frozenset(tool.name for tool in body.tools or () if tool.strict),
        other_choices="none, any or tool",
    )


def _choice(body: PromptFields) -> ToolChoice:
    match body.tool_choice.type if body.tool_choice is not None else "auto":
        case "none":
            return ToolChoice("none")
        case "any":
            return ToolChoice("required")
        case "tool":
            assert body.tool_choice is not None
            return ToolChoice("required", body.tool_choice.name)
        case _:
            return ToolChoice()


def _has_format(body: PromptFields) -> bool:
    return body.output_config is not None and body.output_config.format is not None


def _grammar(body: PromptFields) -> GrammarSpec | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    param = "output_config.format"
    schema = rewrite_schema(body.output_config.format.schema, f"{param}.schema")
    return GrammarSpec(kind="json_schema", text=json.dumps(schema), param=param)


async def _events(
    news: AsyncGenerator[News, None], writer: MessageWriter, message_id: str
) -> AsyncGenerator[bytes, None]:
    """The message's events. Before the first, errors are raised; then they are its last event."""
    is_first = True
    try:
        async with aclosing(news):
            async for each in news:
                counts = each.counts
                events = []
                if is_first:
                    events = writer.start(to_usage(counts.num_prompt, counts.num_cached, counts.num_output, None))
                events += writer.feed(each.deltas)
                if each.finish_reason is not None:
                    events += _finish(each, writer)
                is_first = False
                if events:
                    yield sse(events)
    except Exception as error:
        if is_first:
            raise
        if not isinstance(error, TokenSpeedError):  # a bug of ours; nobody else would log it
            logger.error("a stream failed", exc_info=error)
        yield error_event(error, message_id)


async def _whole(news: AsyncGenerator[News, None], writer: MessageWriter) -> MessageObject:
    async with aclosing(news):
        async for each in news:
            writer.feed(each.deltas)
            if each.finish_reason is not None:
                _finish(each, writer)
    assert writer.message is not None, "the news ended without a finish"
    return writer.message


def _finish(last: News, writer: MessageWriter) -> list[Event]:
    counts = last.counts
    usage = to_usage(counts.num_prompt, counts.num_cached, counts.num_output, counts.num_reasoning)
    return writer.finish(_stop(last), usage)


def _stop(last: News) -> StopDelta:
    match last.finish_reason:
        case "length":
            return StopDelta(stop_reason="max_tokens")
        case "tool_calls":
            return StopDelta(stop_reason="tool_use")
        case _ if last.stop_text is not None:
            return StopDelta(stop_reason="stop_sequence", stop_sequence=last.stop_text)
        case _:
            return StopDelta(stop_reason="end_turn")
