"""The HTTP application: routes, middleware and error shapes put together; and the server that carries it.

What may be added: a router of a new endpoint file, a pure ASGI middleware. Request logic belongs into the file of its
endpoint.
"""

from __future__ import annotations

import asyncio
import socket

from fastapi import FastAPI, Response
from starlette.middleware.cors import CORSMiddleware

import tokenspeed
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.connect import start_engine
from tokenspeed.engine.interface import EngineClient
from tokenspeed.server import admin, parse, profiling
from tokenspeed.server.anthropic import errors as anthropic
from tokenspeed.server.anthropic import messages
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import error_response, install_handlers
from tokenspeed.server.formats import choose_formats
from tokenspeed.server.lifecycle import StopSignal, bind, first_of, run_loop, serve
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, HeadMiddleware
from tokenspeed.server.openai import chat, chat_answer, completions, models, tokenize
from tokenspeed.server.openai.fields import NO_EFFECT
from tokenspeed.server.responses_api import create, stored
from tokenspeed.server.responses_api.store import ResponseStore
from tokenspeed.server.schema import install_openapi

_WIRE_TYPES = (
    chat.ChatRequest,
    chat_answer.ChatResponse,
    completions.CompletionRequest,
    completions.CompletionResponse,
    models.ModelCard,
    models.ModelList,
    tokenize.TokenizeRequest,
    tokenize.TokenizeResponse,
    tokenize.DetokenizeRequest,
    tokenize.DetokenizeResponse,
    *create.WIRE_TYPES,
    *stored.WIRE_TYPES,
    *messages.WIRE_TYPES,
    parse.ReasoningRequest,
    parse.ReasoningResponse,
    parse.FunctionCallRequest,
    parse.FunctionCallResponse,
    admin.Status,
    admin.CommandResult,
    profiling.StartProfileRequest,
    profiling.ProfileResult,
)


def build_app(client: EngineClient, config: ServerConfig) -> FastAPI:
    """The application over an engine. It starts and stops nothing; the caller owns the client."""
    app = FastAPI(
        title="TokenSpeed",
        version=tokenspeed.__version__,
        description="OpenAI-compatible API. A field is honoured or refused by name; taken without any effect on what "
        f"is generated: {', '.join(NO_EFFECT)}.",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages fetch scripts from elsewhere; the schema they show is /openapi.json
        redoc_url=None,
    )
    context = ServerContext(
        client, config, Metrics(client, config.served_model_names[0]), choose_formats(config, client)
    )
    for room in (chat, completions, messages, models, tokenize, parse, admin, profiling):
        app.include_router(room.router(context))
    responses = ResponseStore()
    for kept in (create, stored):
        app.include_router(kept.router(context, responses))
    install_handlers(app, _error_in_shape)
    install_openapi(app, _WIRE_TYPES)
    # The last one added is the outermost: CORS answers preflights, which carry no key.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_request_bytes)
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=config.api_keys)
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _error_in_shape(path: str, error: Exception) -> Response:
    return anthropic.error_response(error) if anthropic.speaks_anthropic(path) else error_response(error)


def run_server(engine_config: EngineConfig, server_config: ServerConfig, startup_timeout_s: float) -> int:
    """Start an engine process and serve it until a signal comes or the engine dies. Main thread only.

    Args:
        startup_timeout_s: seconds that the engine may take to be ready.

    Returns:
        The process's exit code: 0 after SIGTERM or SIGINT, 1 when the engine died.

    Raises:
        ConfigError: the address cannot be used, or the engine refuses its configuration.
        CheckpointError: the engine cannot load the model.
        EngineDead: the engine failed to start.
    """
    with bind(server_config.host, server_config.port) as sock:
        return run_loop(_run_server(engine_config, server_config, startup_timeout_s, sock))


async def _run_server(
    engine_config: EngineConfig, server_config: ServerConfig, startup_timeout_s: float, sock: socket.socket
) -> int:
    stop = StopSignal()
    stop.install()
    starting = asyncio.create_task(
        start_engine(
            engine_config,
            log_level=server_config.log_level,
            start_timeout_s=startup_timeout_s,
            chat_template=server_config.chat_template,
        )
    )
    await first_of(asyncio.wait((starting,)), stop.wait())
    if not starting.done():  # told to stop before it was ready
        starting.cancel()
        await asyncio.wait((starting,))
        return 0
    client = starting.result()
    try:
        return await serve(client, build_app(client, server_config), server_config, sock, stop)
    finally:
        await client.close()
