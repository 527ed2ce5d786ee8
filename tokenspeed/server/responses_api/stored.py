"""GET and DELETE /v1/responses/{id}, its input items, and its cancellation, which only background responses have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.context import ServerContext
from tokenspeed.server.responses import json_response
from tokenspeed.server.responses_api.items import Item
from tokenspeed.server.responses_api.response import ResponseObject
from tokenspeed.server.responses_api.store import ResponseStore, StoredResponse
from tokenspeed.server.schema import documented

MAX_PAGE = 100


class DeletedResponse(msgspec.Struct, kw_only=True):
    """What DELETE answers."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


WIRE_TYPES = (DeletedResponse, ItemList)


def router(context: ServerContext, store: ResponseStore) -> APIRouter:
    """The endpoints, bound to where a server's responses are kept."""
    routes = APIRouter()

    @routes.get("/v1/responses/{response_id}", **documented("OpenAI", None, ResponseObject))
    async def get_response(request: Request, response_id: str) -> Response:
        """A finished response that is still kept."""
        _check_query(request.query_params, {"stream": "false", "include_obfuscation": "false"})
        return json_response(_found(store, response_id).response)

    @routes.delete("/v1/responses/{response_id}", **documented("OpenAI", None, DeletedResponse))
    async def delete_response(response_id: str) -> Response:
        """Forget a response. Those that go on from it still know its text."""
        _found(store, response_id)
        store.delete(response_id)
        return json_response(DeletedResponse(id=response_id))

    @routes.post("/v1/responses/{response_id}/cancel", **documented("OpenAI"))
    async def cancel_response(response_id: str) -> Response:
        """Always an error: only background responses can be cancelled, and there are none."""
        _found(store, response_id)
        raise InvalidRequest(
            "only a response with background = true can be cancelled, which is not offered; to end one that streams, "
            "close its connection",
            param="response_id",
        )

    @routes.get("/v1/responses/{response_id}/input_items", **documented("OpenAI", None, ItemList))
    async def list_input_items(request: Request, response_id: str) -> Response:
        """What the response was made from, earlier responses' items included; newest first unless `order=asc`."""
        query = request.query_params
        _check_query(query, {"after": None, "limit": None, "order": None})
        found = _found(store, response_id)
        earlier = found.previous.conversation() if found.previous is not None else []
        return json_response(_page([*earlier, *found.input_items], query))

    return routes


def _found(store: ResponseStore, response_id: str) -> StoredResponse:
    found = store.get(response_id)
    if found is None:
        raise HTTPException(
            404,
            f"there is no response with id {response_id[:100]!r}; it may have been deleted, or left "
            "memory for newer ones, or was made with store = false",
        )
    return found


def _check_query(query: Mapping[str, str], known: Mapping[str, str | None]) -> None:
    """Refuse what is not known, and what is known with another than its one value (None = any)."""
    for name, value in query.items():
        if name not in known or known[name] not in (None, value.lower()):
            raise InvalidRequest(
                f"the query parameter {name[:80]} = {value[:80]!r} cannot be used here", param=name[:80]
            )


def _page(items: list[Item], query: Mapping[str, str]) -> ItemList:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:80]!r}, it must be asc or desc", param="order")
    text = query.get("limit", "20")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is {text[:80]!r}, it must be between 1 and {MAX_PAGE}", param="limit")
    ordered: list[Any] = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after is {after[:100]!r}, which is no id of these items", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > limit,
    )
