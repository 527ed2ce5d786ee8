"""Routes for operators: probes, version, metrics, cache, what runs here. No wire type of OpenAI's."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

import tokenspeed
from tokenspeed.engine.interface import GenerationRequest
from tokenspeed.protocol.errors import EngineDead, Overloaded
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.server.context import ServerContext, generate
from tokenspeed.server.errors import DEAD_MESSAGE, ClientGone, GenerationFailed, error_response
from tokenspeed.server.metrics import CONTENT_TYPE
from tokenspeed.server.responses import json_response, until_disconnect
from tokenspeed.server.schema import documented

PROBE_TIMEOUT_S = 20.0


class Status(msgspec.Struct, kw_only=True):
    """A probe's good answer."""

    status: str = "ok"


class CommandResult(msgspec.Struct, kw_only=True):
    """What an operator's command did."""

    success: bool
    message: str


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()
    _add_probes(routes, context)
    _add_operations(routes, context)
    return routes


def _add_probes(routes: APIRouter, context: ServerContext) -> None:
    client = context.client

    @routes.get("/liveness", **documented("Probes", None, Status))
    async def liveness() -> Response:
        """The server process turns its loop. Nothing is said of the engine."""
        return json_response(Status())

    @routes.get("/health", **documented("Probes", None, Status))
    async def health() -> Response:
        """200 while the engine process lives, else 503."""
        return json_response(Status()) if client.is_alive else error_response(EngineDead(DEAD_MESSAGE))

    @routes.get("/readiness", **documented("Probes", None, Status))
    async def readiness() -> Response:
        """200 while new requests are taken: the engine lives and the server is not draining."""
        context.check_accepting()
        return json_response(Status())

    @routes.get("/health_generate", **documented("Probes", None, Status))
    async def health_generate(request: Request) -> Response:
        """Generates one token, so it proves the whole way. 503 when that fails or takes longer than 20 s."""
        context.check_accepting()
        if await until_disconnect(request.receive, _probe(context)) is None:
            raise ClientGone
        return json_response(Status())


def _add_operations(routes: APIRouter, context: ServerContext) -> None:
    client = context.client

    @routes.get("/version", **documented("Operations"))
    async def version() -> Response:
        """The package's version."""
        return json_response({"version": tokenspeed.__version__})

    if context.config.enable_metrics:

        @routes.get("/metrics", **documented("Operations"))
        async def metrics() -> Response:
            """Prometheus text."""
            return Response(context.metrics.exposition(), media_type=CONTENT_TYPE)

    @routes.get("/flush_cache", **documented("Operations", None, CommandResult))
    @routes.post("/flush_cache", **documented("Operations", None, CommandResult))
    async def flush_cache() -> Response:
        """Empty the prefix cache. 400 while requests run."""
        return await _command(context, "flush_cache", "the prefix cache is empty", 400)

    @routes.post("/debug/check", **documented("Operations", None, CommandResult))
    async def check() -> Response:
        """Prove the invariants of scheduler and cache between two steps. 500 names the one that is broken."""
        return await _command(context, "check", "the invariants of scheduler and cache hold", 500)

    @routes.get("/get_model_info", **documented("Operations"))
    async def get_model_info() -> Response:
        """The model that is served."""
        model = client.model_config
        return json_response(
            {
                "model_path": context.model_name,
                "served_model_names": context.config.served_model_names,
                "weight_version": context.config.weight_version,
                "architecture": model.architecture,
                "max_model_len": client.max_model_len,
                "vocab_size": model.vocab_size,
                "eos_token_ids": model.eos_token_ids,
                "default_sampling_params": model.sampling_defaults,
                "is_generation": True,
            }
        )

    @routes.get("/get_server_info", **documented("Operations"))
    async def get_server_info() -> Response:
        """The server's settings (without keys), what the KV cache holds and the engine's newest numbers."""
        settings: dict[str, Any] = {
            name: getattr(context.config, name) for name in context.config.__struct_fields__ if name != "api_keys"
        }
        settings["has_api_keys"] = bool(context.config.api_keys)
        cache = {"capacity_tokens": client.kv_capacity_tokens, "groups": client.kv_groups}
        return json_response(
            {"version": tokenspeed.__version__, "server": settings, "kv_cache": cache, "engine": client.stats}
        )


async def _command(
    context: ServerContext, name: Literal["flush_cache", "check"], done: str, refused_status: int
) -> Response:
    """Run a command in the engine's loop. A dead engine is 503."""
    if not context.client.is_alive:
        raise EngineDead(DEAD_MESSAGE)
    ok, error = await context.client.command(name)
    return json_response(
        CommandResult(success=ok, message=done if ok else error or "refused"), 200 if ok else refused_status
    )


async def _probe(context: ServerContext) -> bool:
    model = context.client.model_config
    token = model.bos_token_id if model.bos_token_id is not None else (*model.eos_token_ids, 0)[0]
    request_id = context.claim_id("health", None)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async with aclosing(generate(context, [GenerationRequest(request_id, [token], sampling)])) as events:
                async for _ in events:
                    pass
    except TimeoutError:
        raise GenerationFailed(f"no token within {PROBE_TIMEOUT_S:.0f} s", 503) from None
    except Overloaded:
        return True  # a full queue is a busy engine, not a sick one
    finally:
        context.release_id(request_id)
    return True
