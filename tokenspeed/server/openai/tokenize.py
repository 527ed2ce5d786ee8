"""POST /tokenize and /detokenize, in vLLM's shapes; also under /v1."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext, off_loop
from tokenspeed.server.openai.fields import TokenId
from tokenspeed.server.openai.messages import Message, check_media, to_template
from tokenspeed.server.openai.prompts import encode
from tokenspeed.server.openai.tools import Tool, for_template
from tokenspeed.server.rendering import Conversation, render
from tokenspeed.server.responses import json_response
from tokenspeed.server.schema import documented


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`.

    Fields:
        add_special_tokens: with prompt, default true; with messages only false, for the template writes them itself.
        return_token_strs: also each token's spelling.
        add_generation_prompt, continue_final_message, chat_template_kwargs, tools: with messages, as in chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids and how many they are."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to spell, special tokens included."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text."""

    prompt: str


_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()
    tokenizer = context.client.tokenizer

    def spell(tokens: list[int]) -> list[str]:
        return [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]

    @routes.post("/v1/tokenize", **documented("Tokens", TokenizeRequest, TokenizeResponse))
    @routes.post("/tokenize", **documented("Tokens", TokenizeRequest, TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """The token ids a prompt or a conversation becomes."""
        body = _parse(await read_json(request))
        context.check_model(body.model)
        if body.messages is not None:
            conversation = Conversation(
                messages=to_template(body.messages),
                tools=for_template(body.tools),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs or {},
            )
            tokens = await render(context, conversation, must_fit=False)
        else:
            [tokens] = await encode(context, [body.prompt or ""], body.add_special_tokens is not False)
        spelled = await off_loop(len(tokens), spell, tokens) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(
                count=len(tokens), max_model_len=context.client.max_model_len, tokens=tokens, token_strs=spelled
            )
        )

    @routes.post("/v1/detokenize", **documented("Tokens", DetokenizeRequest, DetokenizeResponse))
    @routes.post("/detokenize", **documented("Tokens", DetokenizeRequest, DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        """The text that token ids spell."""
        body = to_struct(await read_json(request), DetokenizeRequest)
        context.check_model(body.model)
        for token in body.tokens:
            if token >= tokenizer.vocab_size:
                raise InvalidRequest(
                    f"tokens holds the id {token}, the vocabulary has ids 0 to {tokenizer.vocab_size - 1}",
                    param="tokens",
                )
        text = await off_loop(len(body.tokens), tokenizer.decode, body.tokens, False)
        return json_response(DetokenizeResponse(prompt=text))

    return routes


def _parse(fields: dict[str, Any]) -> TokenizeRequest:
    check_media(fields.get("messages"))
    body = to_struct(fields, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens cannot be true with messages: the chat template writes all special tokens itself",
            param="add_special_tokens",
        )
    for name in _CHAT_ONLY:
        if body.messages is None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is only for messages", param=name)
    return body
