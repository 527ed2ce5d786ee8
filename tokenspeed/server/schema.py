"""The OpenAPI page: endpoints read bodies themselves, so their wire types are written into the schema here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tokenspeed.server.errors import ErrorBody

_REF = "#/components/schemas/{name}"


class RouteDocs(TypedDict):
    """Keyword arguments of a FastAPI route decorator."""

    tags: list[str | Any]
    response_model: None
    openapi_extra: dict[str, Any]


def documented(
    tag: str,
    body: type[msgspec.Struct] | None = None,
    answer: type[msgspec.Struct] | None = None,
    *,
    streams: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
) -> RouteDocs:
    """Documentation of a route: its tag, the types of body, answer and errors, and that it may stream."""
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _ref(answer)}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "server-sent events"}}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "Success", **({"content": content} if content else {})},
            "default": {"description": "An error", "content": {"application/json": {"schema": _ref(error)}}},
        }
    }
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return {"tags": [tag], "response_model": None, "openapi_extra": extra}


def install_openapi(app: FastAPI, types: Iterable[type[msgspec.Struct]]) -> None:
    """Make `/openapi.json` carry the schemas of these types (and of what they hold)."""
    all_types = [*types, ErrorBody]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, components = msgspec.json.schema_components(all_types, ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
