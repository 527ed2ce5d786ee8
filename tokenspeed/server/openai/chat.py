"""POST /v1/chat/completions: its wire types and both directions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenspeed.engine.interface import GenerationEvent, GenerationRequest, LogprobEntry
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext, generate
from tokenspeed.server.openai.answer import answer, stream_rules
from tokenspeed.server.openai.constraint import constraint_of
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
from tokenspeed.server.openai.logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, prompt_logprobs
from tokenspeed.server.openai.messages import Message, check_media
from tokenspeed.server.openai.prompts import render_messages
from tokenspeed.server.openai.streaming import Delta, encode_json
from tokenspeed.server.openai.usage import Usage
from tokenspeed.server.schema import documented

_NO_TOOLS = "tool calling is not built yet"
CHAT_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tool_choice": ((None, "none"), f"only 'none'; {_NO_TOOLS}"),
    "functions": ((None, []), f"{_NO_TOOLS}, and functions is the old spelling of tools"),
    "function_call": ((None, "none"), f"{_NO_TOOLS}, and function_call is the old spelling of tool_choice"),
    "reasoning_effort": ((None,), "the models served so far have no such setting; see chat_template_kwargs"),
    "reasoning": ((None,), "the models served so far have no such setting; see chat_template_kwargs"),
    "separate_reasoning": ((None, False), "reasoning parsers are not built yet; the text is one"),
    "stream_reasoning": ((None, False), "reasoning parsers are not built yet; the text is one"),
    "include_reasoning": ((None, False), "reasoning parsers are not built yet; the text is one"),
    "verbosity": ((None, "medium"), "the models served so far have no such setting"),
    "modalities": ((None, ["text"]), "answers are text only"),
    "audio": ((None,), "answers are text only"),
    "prediction": ((None,), "predicted outputs are not built yet"),
    "web_search_options": ((None,), "there is no web search"),
    "moderation": ((None,), "there is no moderation"),
    "chat_template": ((None,), "a template is a program; the operator sets it with --chat-template"),
    "documents": ((None, []), "put them into a message, or into chat_template_kwargs"),
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
        tools: shown to the chat template when tool_choice is "none"; calls are not built yet.
        add_generation_prompt: end the prompt with the start of an assistant turn; default: unless
            continue_final_message.
        continue_final_message: let the last (assistant) message go on instead of starting a new one.
        chat_template_kwargs: variables for the chat template.
    """

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str
    refusal: None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `matched_stop` and `stop_reason` are one thing: the stop string or token id that ended it, if any."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


def router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to a server."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **documented("OpenAI", ChatRequest, ChatResponse, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        context.check_accepting()
        body = parse(await read_json(request))
        context.check_model(body.model)
        priority = check_priority(body, context.config.allow_priority)
        sampling = to_sampling(
            body,
            context.client.model_config,
            max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        grammar = constraint_of(body)
        prompt = await render_messages(
            context,
            body.messages,
            tools=body.tools or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
        request_id = context.claim_id("chatcmpl", request_id_of(body))
        job = GenerationRequest(request_id, prompt, sampling, priority, body.cache_salt, grammar)
        reply = ChatReply(request_id, context.model_name, body, prompt)
        rules = stream_rules(context, body, bool(body.logprobs)) if body.stream else None
        return await answer(context, request, request_id, generate(context, [job]), reply, rules)

    return routes


def parse(fields: dict[str, Any]) -> ChatRequest:
    """The body as a typed request.

    Raises:
        InvalidRequest: an unknown, refused or malformed field, or two that contradict each other.
    """
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise InvalidRequest(f"tools cannot be used: {_NO_TOOLS}", param="tools", code="unsupported_field")
    body_fields = drop_refused(fields, REFUSED, CHAT_REFUSED)
    check_media(body_fields.get("messages"))
    body = to_struct(body_fields, ChatRequest)
    check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only for logprobs = true", param="top_logprobs")
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


@dataclass(slots=True)
class _Answer:
    """One sequence while it grows."""

    delta: Delta = field(default_factory=Delta)
    last: GenerationEvent | None = None


class ChatReply:
    """Writes one request's events as chat chunks or as one chat completion."""

    def __init__(self, request_id: str, model_name: str, body: ChatRequest, prompt_token_ids: list[int]) -> None:
        self._id = request_id
        self._model = model_name
        self._created = int(time.time())
        self._wants_logprobs = bool(body.logprobs)
        self._wants_ids = bool(body.return_token_ids)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[LogprobEntry] = []
        self._answers = [_Answer() for _ in range(body.n or 1)]
        self._sent_prompt = False
        self._head = b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s' % (
            encode_json(request_id),
            self._created,
            encode_json(model_name),
        )
        self._text_heads = [self._head + b',"choices":[{"index":%d,"delta":{"content":' % i for i in range(body.n or 1)]

    def open(self, choice: int, _prompt: int, _event: GenerationEvent) -> bytes:
        """The role chunk; the first of all carries the prompt's ids when asked."""
        head = self._head
        if self._wants_ids and not self._sent_prompt:
            self._sent_prompt = True
            head += b',"prompt_token_ids":' + encode_json(self._prompt_token_ids)
        return (
            head + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]' % choice
        )

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of only text."""
        return self._text_heads[choice] + encode_json(text) + b'},"logprobs":null,"finish_reason":null}]'

    def delta(self, choice: int, delta: Delta) -> bytes:
        """A chunk with text and what else was asked."""
        logprobs = encode_json(chat_logprobs(delta.logprobs)) if self._wants_logprobs else b"null"
        ids = b',"token_ids":' + encode_json(delta.token_ids) if self._wants_ids else b""
        text = encode_json("".join(delta.text))
        return self._text_heads[choice] + text + b'},"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]"

    def finish(self, choice: int, event: GenerationEvent) -> bytes:
        """The choice's last chunk."""
        stop = encode_json(event.stop_reason)
        return (
            self._head + b',"choices":[{"index":%d,"delta":{},"logprobs":null,'
            b'"finish_reason":%s,"matched_stop":%s,"stop_reason":%s}]'
            % (choice, encode_json(event.finish_reason), stop, stop)
        )

    def usage(self) -> bytes:
        """The start of the chunk with no choices."""
        return self._head + b',"choices":[]'

    def note(self, _prompt: int, event: GenerationEvent) -> None:
        """Collect an event for the whole answer."""
        answer = self._answers[event.index]
        answer.delta.add(event)
        answer.last = event
        self._prompt_logprobs += event.prompt_logprobs

    def whole(self, usage: Usage) -> ChatResponse:
        """The whole answer, after all sequences have ended."""
        unset = msgspec.UNSET
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index) for index in range(len(self._answers))],
            usage=usage,
            prompt_logprobs=prompt_logprobs(self._prompt_logprobs) if self._wants_prompt_logprobs else unset,
            prompt_token_ids=self._prompt_token_ids if self._wants_ids else unset,
        )

    def _choice(self, index: int) -> ChatChoice:
        done = self._answers[index]
        assert done.last is not None and done.last.finish_reason is not None
        return ChatChoice(
            index=index,
            message=AnswerMessage(content="".join(done.delta.text)),
            logprobs=chat_logprobs(done.delta.logprobs) if self._wants_logprobs else None,
            finish_reason=done.last.finish_reason,
            matched_stop=done.last.stop_reason,
            stop_reason=done.last.stop_reason,
            token_ids=done.delta.token_ids if self._wants_ids else msgspec.UNSET,
        )
