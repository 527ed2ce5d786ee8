"""POST /v1/responses over a fake engine: all that coding agents send at once; nothing of it may be refused."""

from __future__ import annotations

import json

from app_client import http_client
from fake_engine_client import FakeClient
from test_responses_api import CALLS, PARSERS, THINKS, URL, WEATHER, typed_events

from tokenspeed.server.carried import pack


async def test_a_coding_agents_request(engine: FakeClient):
    """All that such clients send at once; nothing of it may be refused."""
    engine.reply, engine.max_model_len = f"{THINKS}{CALLS}", 10_000
    tool = {**WEATHER, "description": "now", "strict": False}
    body = {
        "model": "tiny",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [tool, {**tool, "name": "shell"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "text": {"verbosity": "medium"},
    }
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(URL, json=body)
    assert response.status_code == 200, response.text
    last = typed_events(response.text)[-1]
    assert last["type"] == "response.completed" and last["response"]["output"][0]["encrypted_content"] == pack("hm")
    assert engine.rendered[0]["messages"][0] == {"role": "system", "content": "be brief\n\nrules"}


# What the Codex CLI sends to a provider with the Responses API, with its defaults: the fields of its request type, its
# own functions, and tools that OpenAI's servers or other protocols run. The texts are ours.
CODEX_TOOLS = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "mcp__notes", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
]
CODEX = {
    "model": "tiny",
    "instructions": "You work in a terminal.",
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "00000000-0000-0000-0000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "00000000-0000-0000-0000-000000000000"},
}


async def test_two_turns_of_the_codex_cli(engine: FakeClient):
    """The first calls the shell; the second brings its result and all that was before, as such a client keeps it."""
    engine.reply = f'{THINKS}<tool_call>\n{{"name": "shell", "arguments": {{"command": ["ls"]}}}}\n</tool_call>'
    engine.max_model_len = 10_000
    said = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "what is here?"}]},
    ]
    async with http_client(engine, **PARSERS) as http:
        first = await http.post(URL, json={**CODEX, "input": said})
        assert first.status_code == 200, first.text
        done = [event["item"] for event in typed_events(first.text) if event["type"] == "response.output_item.done"]
        reasoning, call = done
        assert (call["name"], json.loads(call["arguments"])) == ("shell", {"command": ["ls"]})
        kept = [
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": reasoning["encrypted_content"]},
            {key: call[key] for key in ("type", "name", "arguments", "call_id")},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"},
        ]
        engine.reply = "one file"
        second = await http.post(URL, json={**CODEX, "input": [*said, *kept]})
        assert second.status_code == 200, second.text
    assert typed_events(second.text)[-1]["response"]["output"][0]["content"][0]["text"] == "one file"
    system, user, assistant, tool = engine.rendered[-1]["messages"]
    assert system["content"] == "You work in a terminal.\n\nrules" and user["content"] == "what is here?"
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "shell", "arguments": {"command": ["ls"]}}
    assert tool["content"] == "README.md"
    assert [tool["function"]["name"] for tool in engine.rendered[-1]["tools"]] == ["shell", "mcp__notes__read"]
