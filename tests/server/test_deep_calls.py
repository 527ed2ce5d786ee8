"""A call whose arguments nest a thousand deep, on every way on which a model's text is read."""

from __future__ import annotations

from typing import Any

import pytest
from app_client import chat
from scripted_engine import ScriptedClient
from test_chat_tools import TOOLS, both, qwen_call, serving

ARGUMENTS = ["[" * 1000 + "]" * 1000, '{"a": ' + "[" * 1000 + "]" * 1000 + "}", '{"a":' * 1000 + "1" + "}" * 1000]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["array", "inside", "object"])
async def test_no_way_fails(arguments: str) -> None:
    """It was a RecursionError and so a 500; in a stream, an error in its middle."""
    text = qwen_call("f", arguments)
    engine = ScriptedClient(text)
    bodies: dict[str, dict[str, Any]] = {
        "/parse/function_call": {"text": text},
        "/v1/responses": {"model": "tiny", "input": "a", "tools": [{"type": "function", "name": "f"}]},
        "/v1/messages": {
            "model": "tiny",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    }
    async with serving(engine) as http:
        assert len(await both(http, tools=TOOLS)) == 1
        for path, body in bodies.items():
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
        for path in ("/v1/responses", "/v1/messages"):
            assert "internal_error" not in (await http.post(path, json={**bodies[path], "stream": True})).text
        history = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [history]}]
        assert (await http.post("/v1/chat/completions", json=chat(messages=messages))).status_code == 400
