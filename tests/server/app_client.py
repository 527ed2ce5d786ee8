"""An HTTP client that talks ASGI to an application over a fake engine, and what tests send and read with it."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fake_engine_client import FakeClient

from tokenspeed.config.server import ServerConfig
from tokenspeed.server.app import build_app


def http_client(engine: FakeClient, **settings: Any) -> httpx.AsyncClient:
    """A client over an application with these settings."""
    config = ServerConfig(**{"served_model_names": ("tiny", "tiny-alias"), **settings})
    transport = httpx.ASGITransport(build_app(engine, config), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def chat(**fields: Any) -> dict[str, Any]:
    """A small chat body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


def events(text: str) -> list[Any]:
    """The parsed events of an SSE body; the last must be [DONE], which is left out."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
