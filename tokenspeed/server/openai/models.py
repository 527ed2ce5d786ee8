"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from tokenspeed.server.context import ServerContext
from tokenspeed.server.responses import json_response
from tokenspeed.server.schema import documented


class ModelCard(msgspec.Struct, kw_only=True):
    """A served name. `root` is the first name of the same model; `max_model_len` counts prompt and output tokens."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenspeed"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: str = "list"
    data: list[ModelCard]


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name, created=context.created, root=context.model_name, max_model_len=context.client.max_model_len
        )

    @routes.get("/v1/models", **documented("OpenAI", None, ModelList))
    async def list_models() -> Response:
        """The names that `model` may say."""
        return json_response(ModelList(data=[card(name) for name in context.config.served_model_names]))

    @routes.get("/v1/models/{model_id:path}", **documented("OpenAI", None, ModelCard))
    async def get_model(model_id: str) -> Response:
        """One served name."""
        context.check_model(model_id)
        return json_response(card(model_id))

    return routes
