"""POST /parse/reasoning and /parse/function_call: the parsers over a finished text, without a model.

SGLang's shapes: the fields of both its engine and its gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext, off_loop
from tokenspeed.server.openai.chat_answer import AnswerToolCall, CalledFunction
from tokenspeed.server.openai.tools import Tool, for_template
from tokenspeed.server.responses import json_response
from tokenspeed.server.schema import documented
from tokenspeed.text.parsers.interface import (
    ParseContext,
    Parsed,
    ParsedCall,
    ReasoningFormat,
    ToolFormat,
    parse_all,
    tool_specs,
)
from tokenspeed.text.parsers.pipeline import build_pipeline
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats
from tokenspeed.text.parsers.select import AUTO

_F = TypeVar("_F", ReasoningFormat, ToolFormat)


class ReasoningRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output. `reasoning_parser`: a name as in `--reasoning-parser`; default: this server's."""

    text: str
    reasoning_parser: str | None = None


class ReasoningResponse(msgspec.Struct, kw_only=True):
    """The output in two. `text` and `normal_text` are one thing."""

    reasoning_text: str
    text: str
    normal_text: str
    success: Literal[True] = True


class FunctionCallRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output. `tool_call_parser`: a name as in `--tool-call-parser`; default: this server's. `tools`: only calls of
    these are calls; null = any name is."""

    text: str
    tools: list[Tool] | None = None
    tool_call_parser: str | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call in the engine's shape. `parameters` is JSON text; `tool_index` its place among the tools, -1 = unknown."""

    tool_index: int
    name: str
    parameters: str


class FunctionCallResponse(msgspec.Struct, kw_only=True):
    """The calls, and the rest. `normal_text` and `remaining_text` are one thing, `calls` and `tool_calls` tell of the
    same calls. `success`: every call has an end; else the last one's arguments are what there was of them."""

    normal_text: str
    remaining_text: str
    calls: list[CallItem]
    tool_calls: list[AnswerToolCall]
    success: bool


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()

    @routes.post("/separate_reasoning", **documented("Parsers", ReasoningRequest, ReasoningResponse))
    @routes.post("/parse/reasoning", **documented("Parsers", ReasoningRequest, ReasoningResponse))
    async def parse_reasoning(request: Request) -> Response:
        """Reasoning and answer of an output, apart."""
        body = to_struct(await read_json(request), ReasoningRequest)
        own = context.formats.reasoning
        chosen = _pick("reasoning_parser", body.reasoning_parser, own, reasoning_formats())
        parser = build_pipeline(chosen, tool_formats()["passthrough"], ParseContext(), parse_calls=False)
        parsed: Parsed = await off_loop(len(body.text), parse_all, parser, body.text)
        return json_response(
            ReasoningResponse(reasoning_text=parsed.reasoning, text=parsed.content, normal_text=parsed.content)
        )

    @routes.post(
        "/parse_function_call",
        operation_id="parse_function_call_engine",
        **documented("Parsers", FunctionCallRequest, FunctionCallResponse),
    )
    @routes.post("/parse/function_call", **documented("Parsers", FunctionCallRequest, FunctionCallResponse))
    async def parse_function_call(request: Request) -> Response:
        """The tool calls of an output. Reasoning is not looked for."""
        body = to_struct(await read_json(request), FunctionCallRequest)
        chosen = _pick("tool_call_parser", body.tool_call_parser, context.formats.tools, tool_formats())
        tools = None if body.tools is None else tool_specs(for_template(body.tools))
        parser = build_pipeline(reasoning_formats()["passthrough"], chosen, ParseContext(tools=tools))
        parsed: Parsed = await off_loop(len(body.text), parse_all, parser, body.text)
        places = {tool.name: place for place, tool in enumerate(tools or ())}
        return json_response(
            FunctionCallResponse(
                normal_text=parsed.content,
                remaining_text=parsed.content,
                calls=[
                    CallItem(tool_index=places.get(call.name, -1), name=call.name, parameters=call.arguments)
                    for call in parsed.calls
                ],
                tool_calls=[_answer(call) for call in parsed.calls],
                success=not parser.incomplete,
            )
        )

    return routes


def _answer(call: ParsedCall) -> AnswerToolCall:
    return AnswerToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def _pick(field: str, name: str | None, own: _F, known: Mapping[str, _F]) -> _F:
    if name in (None, AUTO):
        return own
    if name not in known:
        raise InvalidRequest(f"{field} is {name[:80]!r}, there are {', '.join(sorted(known))}", param=field)
    return known[name]
