"""POST /v1/responses: functions inside namespaces, as agents send the tools of MCP servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_client import http_client
from fake_engine_client import FakeClient
from openai.types.responses import NamespaceToolParam, ResponseFunctionToolCall
from test_responses_api import PARSERS, URL, WEATHER, typed_events
from test_responses_api_sdk import sdk

from tokenspeed.server.responses_api.namespaces import flat_name

READ: dict[str, Any] = {
    "type": "function",
    "name": "read",
    "description": "Reads one.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
}
NOTES: NamespaceToolParam = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "What the user wrote down.",
    "tools": [READ, {**READ, "name": "drop", "description": None}],  # type: ignore[list-item]
}
MAIL: NamespaceToolParam = {**NOTES, "name": "mcp__mail__", "description": ""}
WRONG: dict[str, Any] = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}


def calling(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"id": 7}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("namespace", "flat"), [(None, "read"), ("", "read"), ("mcp__notes", "mcp__notes__read"), ("n__", "n__read")]
)
def test_flat_names(namespace: str | None, flat: str):
    assert flat_name(namespace, "read") == flat


@pytest.mark.parametrize("stream", [True, False])
async def test_a_loop_of_the_sdk(engine: FakeClient, stream: bool):
    """The call names namespace and function apart, and goes back as it came, with its output."""
    engine.reply, engine.max_model_len = calling("mcp__notes__read"), 10_000
    tools: list[Any] = [WEATHER, NOTES]
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    async with sdk(engine) as client:
        if stream:
            async with client.responses.stream(model="tiny", input=talk, tools=tools, store=False) as events:
                seen = [event async for event in events]
                first: Any = await events.get_final_response()
            added = next(event.item for event in seen if event.type == "response.output_item.added")
            assert isinstance(added, ResponseFunctionToolCall) and (added.namespace, added.name) == (
                "mcp__notes",
                "read",
            )
            done = next(event for event in seen if event.type == "response.function_call_arguments.done").to_dict()
            assert (done["name"], json.loads(str(done["arguments"]))) == ("read", {"id": 7})
        else:
            first = await client.responses.create(model="tiny", input=talk, tools=tools, store=False)
        (call,) = first.output
        assert isinstance(call, ResponseFunctionToolCall) and json.loads(call.arguments) == {"id": 7}
        assert (call.namespace, call.name) == ("mcp__notes", "read")
        assert [tool.type for tool in first.tools] == ["function", "namespace"]
        assert [each.name for each in first.tools[1].tools] == ["read", "drop"]
        engine.reply = "milk"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "milk", "name": "read"}
        talk += [call, {**output, "namespace": "mcp__notes"}]
        second = await client.responses.create(model="tiny", input=talk, tools=tools)
        assert second.output_text == "milk"
        kept = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        third = await client.responses.create(model="tiny", input="more", previous_response_id=second.id)
        assert third.status == "completed"
    assert isinstance(kept[1], ResponseFunctionToolCall) and (kept[1].namespace, kept[1].name) == ("mcp__notes", "read")
    for rendered in engine.rendered[1:]:  # also where the request no longer has the tool
        assistant = next(message for message in rendered["messages"] if message["role"] == "assistant")
        assert assistant["tool_calls"][0]["function"] == {"name": "mcp__notes__read", "arguments": {"id": 7}}


async def test_what_the_model_is_shown(engine: FakeClient):
    """Flat names; what a namespace says of itself stands once."""
    engine.max_model_len = 10_000
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(URL, json={"input": "hi", "tools": [NOTES, MAIL, WEATHER]})
    assert response.status_code == 200, response.text
    shown = [(tool["function"]["name"], tool["function"].get("description")) for tool in engine.rendered[0]["tools"]]
    assert shown == [
        ("mcp__notes__read", "(Of all mcp__notes functions: What the user wrote down.)\nReads one."),
        ("mcp__notes__drop", None),
        ("mcp__mail__read", "Reads one."),
        ("mcp__mail__drop", None),
        ("weather", None),
    ]


async def test_plain_calls_have_no_namespace(engine: FakeClient):
    engine.reply, engine.max_model_len = calling("weather"), 10_000
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(URL, json={"input": "hi", "tools": [NOTES, WEATHER], "stream": True})
    (item,) = typed_events(response.text)[-1]["response"]["output"]
    assert item["name"] == "weather" and "namespace" not in item


@pytest.mark.parametrize(
    ("choice", "flat"),
    [
        ({"type": "function", "name": "read", "namespace": "mcp__notes"}, "mcp__notes__read"),
        ({"type": "function", "name": "mcp__notes__read"}, "mcp__notes__read"),
        ({"type": "function", "name": "list"}, "cal__list"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "cal"}]}, "cal__list"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "list"}]}, "cal__list"),
    ],
)
async def test_tool_choice(engine: FakeClient, choice: dict[str, Any], flat: str):
    """The grammar of a forced call knows that one function, by its flat name; the answer has both names."""
    engine.reply = f'hm</think>[{{"name": "{flat}", "arguments": {{"id": 7}}}}]'
    engine.max_model_len = 10_000
    cal = {"type": "namespace", "name": "cal", "tools": [{**READ, "name": "list"}]}
    async with http_client(engine, **PARSERS) as http:
        body = {"input": "hi", "tools": [NOTES, MAIL, WEATHER, cal], "tool_choice": choice}
        response = await http.post(URL, json=body)
    assert response.status_code == 200, response.text
    grammar = engine.requests[0].grammar
    assert grammar is not None and flat in grammar.text and "weather" not in grammar.text
    (_, call) = response.json()["output"]
    assert flat_name(call["namespace"], call["name"]) == flat
    assert response.json()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": [WRONG]}, "tools[0].tools[0].name", "a b"),
        ({"tools": [{**WRONG, "tools": [{"type": "magic"}]}]}, "tools[0].tools[0].type", "magic"),
        ({"tools": [{**WRONG, "tools": [NOTES]}]}, "tools[0].tools[0].type", "namespace"),
        ({"tools": [{**WRONG, "tools": 3}]}, "tools[0].tools", "3"),
        ({"tools": [{**NOTES, "tools": [{**READ, "async": True}]}]}, "tools[0].tools[0].async", "async"),
        ({"tools": [{**READ, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers", "direct"),
        ({"tools": [NOTES, {**READ, "name": "mcp__notes__read"}]}, "tools[2]", "mcp__notes__read"),
        ({"tools": [NOTES, MAIL], "tool_choice": {"type": "function", "name": "read"}}, "tool_choice", "mcp__mail__"),
        (
            {"tools": [NOTES], "tool_choice": {"type": "function", "name": "read", "namespace": "mcp__mail"}},
            "tool_choice",
            "mcp__mail__read",
        ),
        (
            {
                "tools": [NOTES],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "x"}]},
            },
            "tool_choice",
            "'x'",
        ),
    ],
)
async def test_refusals(engine: FakeClient, body: dict[str, Any], param: str, said: str):
    engine.max_model_len = 10_000
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(URL, json={"input": "hi", **body})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and said in error["message"], error


async def test_what_changes_nothing(engine: FakeClient):
    """Fields of newer tool types; tools inside a namespace that are no functions; a namespace of nothing else."""
    engine.max_model_len = 10_000
    tool = {**READ, "defer_loading": True, "output_schema": {"type": "object"}, "allowed_callers": ["direct"]}
    custom = {"type": "custom", "name": "patch"}
    tools = [
        {**NOTES, "tools": [{**tool, "async": False}, custom]},
        {"type": "namespace", "name": "c", "tools": [custom]},
    ]
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(URL, json={"input": "hi", "tools": tools})
    assert response.status_code == 200, response.text
    assert [tool["function"]["name"] for tool in engine.rendered[0]["tools"]] == ["mcp__notes__read"]
    assert [tool["name"] for tool in response.json()["tools"]] == ["mcp__notes"]
