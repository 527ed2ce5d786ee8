"""POST /v1/chat/completions: what a request may say, and the way through. Answers are in `chat_answer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.sampling import MAX_LOGPROBS
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext, check_off_loop, generate
from tokenspeed.server.field_names import spoken_as
from tokenspeed.server.openai.answer import answer, stream_rules
from tokenspeed.server.openai.chat_answer import ChatReply, ChatResponse, ChatWants
from tokenspeed.server.openai.constraint import constraint_chars, constraint_of
from tokenspeed.server.openai.fields import (
    REFUSED,
    GenerationFields,
    Int32,
    check_priority,
    check_stream,
    drop_refused,
    request_id_of,
    to_sampling,
)
from tokenspeed.server.openai.messages import Message, check_media, to_template
from tokenspeed.server.openai.tools import Tool, ToolChoiceField, check_kinds, choice_of, for_template
from tokenspeed.server.rendering import Conversation
from tokenspeed.server.schema import documented
from tokenspeed.server.turn import TurnRequest, prepare_turn

CHAT_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((None, []), "it is the old spelling of tools"),
    "function_call": ((None, "none"), "it is the old spelling of tool_choice"),
    "reasoning": ((None,), "use reasoning_effort, or chat_template_kwargs"),
    "include_reasoning": ((None, True), "reasoning is part of the answer; use separate_reasoning to have it apart"),
    "verbosity": ((None, "medium"), "the models served so far have no such setting"),
    "modalities": ((None, ["text"]), "answers are text only"),
    "audio": ((None,), "answers are text only"),
    "prediction": ((None,), "predicted outputs are not built yet"),
    "web_search_options": ((None,), "there is no web search"),
    "moderation": ((None,), "there is no moderation"),
    "chat_template": ((None,), "a template is a program; the operator sets it with --chat-template"),
    "echo": ((None, False), "use /v1/completions"),
    "suffix": ((None,), "chat has no suffix"),
    "best_of": ((None,), "use n"),
    "add_special_tokens": ((None, False), "the chat template writes all special tokens itself"),
    "mm_processor_kwargs": ((None,), "this model takes text only"),
    "media_io_kwargs": ((None,), "this model takes text only"),
}


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """A chat completion request.

    Fields:
        max_completion_tokens: OpenAI's newer name of max_tokens.
        logprobs, top_logprobs: logprobs of the answer's tokens, with 0 to 20 alternatives each.
        tools, tool_choice, parallel_tool_calls: as OpenAI has them; default: the model decides, and may call several.
        reasoning_effort: none and minimal turn thinking off, the others on, where the chat template has a switch; every
            template can read it as `reasoning_effort`.
        thinking_budget: tokens of reasoning after which it is closed; default: as many as the model wants.
        separate_reasoning: reasoning in `reasoning_content` (default), or as part of the content.
        stream_reasoning: stream reasoning as it comes (default), or in one piece when it has ended.
        documents: for chat templates that read them.
        add_generation_prompt: end the prompt with the start of an assistant turn; default: unless
            continue_final_message.
        continue_final_message: let the last (assistant) message go on instead of starting a new one.
        chat_template_kwargs: variables for the chat template.
    """

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to a server."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **documented("OpenAI", ChatRequest, ChatResponse, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        context.check_accepting()
        body = parse(await read_json(request))
        context.check_model(body.model)
        with spoken_as(field_names(body)):
            return await respond(request, body)

    async def respond(request: Request, body: ChatRequest) -> Response:
        priority = check_priority(body, context.config.allow_priority)
        sampling = to_sampling(
            body,
            context.client.model_config,
            max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        asked = await check_off_loop(constraint_chars(body), to_turn, body)
        if body.thinking_budget is not None and context.formats.reasoning.end_marker is None:
            raise InvalidRequest(
                "thinking_budget has nothing to bound: no format of reasoning is known for this model; leave it out or "
                "start the server with --reasoning-parser",
                param="thinking_budget",
            )
        turn = await prepare_turn(context, asked, sampling)
        request_id = context.claim_id("chatcmpl", request_id_of(body))
        wants = ChatWants(bool(body.logprobs), bool(body.return_token_ids), body.prompt_logprobs is not None)
        reply = ChatReply(request_id, context.config, turn, wants)
        events = generate(context, [turn.generation(request_id, priority, body.cache_salt)], reply.is_done)
        rules = stream_rules(context, body, bool(body.logprobs)) if body.stream else None
        return await answer(context, request, request_id, events, reply, rules)

    return routes


def parse(fields: dict[str, Any]) -> ChatRequest:
    """The body as a typed request.

    Raises:
        InvalidRequest: an unknown, refused or malformed field, or two that contradict each other.
    """
    body_fields = drop_refused(fields, REFUSED, CHAT_REFUSED)
    check_media(body_fields.get("messages"))
    check_kinds(body_fields)
    body = to_struct(body_fields, ChatRequest)
    check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only for logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}, it must be between 0 and {MAX_LOGPROBS}", param="top_logprobs"
        )
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; send one of them",
            param="max_completion_tokens",
        )
    return body


def field_names(body: ChatRequest) -> dict[str, str]:
    """What this request calls the fields that have another name, or another form, behind it."""
    is_newer = body.max_tokens is None and body.max_completion_tokens is not None
    return {"prompt": "messages", **({"max_tokens": "max_completion_tokens"} if is_newer else {})}


def to_turn(body: ChatRequest) -> TurnRequest:
    """The request in neutral words.

    Raises:
        InvalidRequest: messages, tools or a constraint that cannot be used; names the field.
    """
    tools = for_template(body.tools)
    return TurnRequest(
        conversation=Conversation(
            messages=to_template(body.messages),
            tools=tools,
            documents=body.documents or (),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        ),
        choice=choice_of(body.tool_choice, bool(tools)),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        thinking_budget=body.thinking_budget,
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        grammar=constraint_of(body),
        yields_to_tools=body.response_format is not None,
        strict_tools=frozenset(tool.function.name for tool in body.tools or () if tool.function.strict),
    )
