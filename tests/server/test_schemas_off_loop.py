"""Schemas are checked beside the event loop: one request's held all streams up for two seconds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from app_client import chat, http_client
from fake_engine_client import FakeClient

from tokenspeed.grammar.json_schema import _Rewriter

LONG = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(60)}}
SHORT = {"type": "integer"}
MESSAGES = [{"role": "user", "content": "hi"}]


def body_of(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "n", "schema": schema}
    match path:
        case "/v1/chat/completions":
            return chat(response_format={"type": "json_schema", "json_schema": named})
        case "/v1/completions":
            return {"model": "tiny", "prompt": "a", "structured_outputs": {"json": schema}}
        case "/v1/responses":
            return {"model": "tiny", "input": "hi", "text": {"format": {"type": "json_schema", **named}}}
    message = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES}
    return {**message, "output_config": {"format": {"type": "json_schema", "schema": schema}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_long_schemas_are_checked_on_another_thread(path: str, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []
    run = _Rewriter.run

    def noted(self: _Rewriter) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return run(self)

    monkeypatch.setattr(_Rewriter, "run", noted)
    async with http_client(FakeClient()) as http:
        for schema in (SHORT, LONG):
            response = await http.post(path, json=body_of(path, schema))
            assert response.status_code == 200, response.text
        refused = await http.post(path, json=body_of(path, {**LONG, "multipleOf": 3}))
    assert refused.status_code == 400 and "multipleOf" in refused.json()["error"]["message"]
    assert threads[0] is threading.main_thread()
    assert all(thread is not threading.main_thread() for thread in threads[1:])
