"""The HTTP application: routes, middleware and error shapes put together. Nothing is decided here.

What may be added: a router of a new endpoint file, a pure ASGI middleware. Request logic belongs into the file of its
endpoint.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import tokenspeed
from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import EngineClient
from tokenspeed.server import admin
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import install_handlers
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from tokenspeed.server.openai import chat, completions, models, tokenize
from tokenspeed.server.schema import install_openapi

_WIRE_TYPES = (
    chat.ChatRequest,
    chat.ChatResponse,
    completions.CompletionRequest,
    completions.CompletionResponse,
    models.ModelCard,
    models.ModelList,
    tokenize.TokenizeRequest,
    tokenize.TokenizeResponse,
    tokenize.DetokenizeRequest,
    tokenize.DetokenizeResponse,
    admin.Status,
    admin.CommandResult,
)


def build_app(client: EngineClient, config: ServerConfig) -> FastAPI:
    """The application over an engine. It starts and stops nothing; the caller owns the client."""
    app = FastAPI(
        title="TokenSpeed",
        version=tokenspeed.__version__,
        description="OpenAI-compatible API of a TokenSpeed server.",
        redirect_slashes=False,
    )
    context = ServerContext(client, config, Metrics(client, config.served_model_names[0]))
    for room in (chat, completions, models, tokenize, admin):
        app.include_router(room.router(context))
    install_handlers(app)
    install_openapi(app, _WIRE_TYPES)
    # The last one added is the outermost: CORS answers preflights, which carry no key.
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
