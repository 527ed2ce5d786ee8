"""POST /parse/reasoning and /parse/function_call."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from app_client import http_client
from fake_engine_client import FakeClient

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("e", "f")]


async def post(path: str, engine: FakeClient, settings: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    async with http_client(engine, **(settings or {})) as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("path", ["/parse/reasoning", "/separate_reasoning"])
async def test_reasoning(engine: FakeClient, path: str):
    text = "<think>a</think>b" + CALL
    answer = await post(path, engine, text=text, reasoning_parser="base")
    assert answer.json() == {
        "reasoning_text": "a",
        "text": "b" + CALL,
        "normal_text": "b" + CALL,
        "success": True,
    }
    own = await post(path, engine, {"reasoning_parser": "qwen3"}, text=text)
    assert own.json()["reasoning_text"] == "a"


@pytest.mark.parametrize("path", ["/parse/function_call", "/parse_function_call"])
async def test_function_calls(engine: FakeClient, path: str):
    body = (await post(path, engine, text="Hi " + CALL, tools=TOOLS, tool_call_parser="qwen")).json()
    assert body["normal_text"] == body["remaining_text"] == "Hi" and body["success"] is True
    assert body["calls"] == [{"tool_index": 1, "name": "f", "parameters": '{"a": 1}'}]
    (call,) = body["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["id"].startswith("call_")


async def test_names_on_offer_and_any_names(engine: FakeClient):
    settings = {"tool_call_parser": "qwen"}
    other = await post("/parse/function_call", engine, settings, text=CALL, tools=TOOLS[:1])
    assert other.json()["calls"] == [] and other.json()["normal_text"] == CALL
    anyone = await post("/parse/function_call", engine, settings, text=CALL)
    assert anyone.json()["calls"][0]["tool_index"] == -1


async def test_a_cut_call_is_no_success(engine: FakeClient):
    body = (await post("/parse/function_call", engine, text=CALL[:43], tool_call_parser="qwen")).json()
    assert (
        body["success"] is False and body["calls"][0]["parameters"] == '{"a": 1}'[: len(body["calls"][0]["parameters"])]
    )


@pytest.mark.parametrize(
    ("path", "field"), [("/parse/reasoning", "reasoning_parser"), ("/parse/function_call", "tool_call_parser")]
)
async def test_an_unknown_parser_is_refused_with_the_list(engine: FakeClient, path: str, field: str):
    answer = await post(path, engine, text="x", **{field: "qwen9"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and "kimi_k3, " in error["message"]
