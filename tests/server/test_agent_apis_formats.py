"""Every format of calls and of reasoning through `/v1/responses` and `/v1/messages`, by the samples in its file."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from app_client import events, http_client
from chat_streams import of_choice, of_chunks
from fake_engine_client import FakeClient
from test_anthropic_api import assembled
from test_responses_api import typed_events

from tokenspeed.text.parsers.interface import Example
from tokenspeed.text.parsers.registry import reasoning_examples, tool_examples

SAMPLES = [
    pytest.param(flag, name, example, id=f"{name}-{index}")
    for flag, found in (("tool_call_parser", tool_examples()), ("reasoning_parser", reasoning_examples()))
    for name, examples in found.items()
    for index, example in enumerate(examples)
    if example.prompt is None and not example.incomplete and example.finish_reason == "stop"
    # A number beyond a float's range has no value that `/v1/messages` could give as JSON.
    if not any(math.inf in arguments.values() for _, arguments in example.calls)
]


def tools_of(example: Example) -> dict[str, dict[str, Any]]:
    """Name to schema: the sample's tools, or ones of any arguments."""
    if example.tools is not None:
        return {tool.name: dict(tool.parameters) for tool in example.tools}
    return {name: {"type": "object"} for name, _ in example.calls}


def seen(blocks: list[tuple[str, Any]]) -> tuple[str, str, list[Any]]:
    """Reasoning, text and calls of (kind, value) blocks."""
    joined = {kind: "".join(value for found, value in blocks if found == kind) for kind in ("reasoning", "text")}
    return joined["reasoning"].strip(), joined["text"].strip(), [value for kind, value in blocks if kind == "call"]


def of_items(output: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    blocks: list[tuple[str, Any]] = []
    for item in output:
        assert item["status"] == "completed"
        match item["type"]:
            case "reasoning":
                blocks.append(("reasoning", item["content"][0]["text"]))
            case "message":
                blocks.append(("text", item["content"][0]["text"]))
            case _:
                blocks.append(("call", (item["name"], json.loads(item["arguments"]))))
    return seen(blocks)


def of_blocks(message: dict[str, Any]) -> tuple[str, str, list[Any]]:
    blocks: list[tuple[str, Any]] = []
    for block in message["content"]:
        match block["type"]:
            case "thinking":
                blocks.append(("reasoning", block["thinking"]))
            case "text":
                blocks.append(("text", block["text"]))
            case _:
                blocks.append(("call", (block["name"], block["input"])))
    return seen(blocks)


@pytest.mark.parametrize(("flag", "name", "example"), SAMPLES)
async def test_sample(engine: FakeClient, flag: str, name: str, example: Example):
    engine.reply, engine.max_model_len, engine.chunk = example.text, 10_000, 3
    tools = tools_of(example)
    functions = [{"type": "function", "name": tool, "parameters": schema} for tool, schema in tools.items()]
    custom = [{"name": tool, "input_schema": schema} for tool, schema in tools.items()]
    responses = {"input": "hi", "tools": functions}
    messages = {"model": "tiny", "max_tokens": 9000, "messages": [{"role": "user", "content": "hi"}], "tools": custom}
    expected = example.reasoning.strip(), example.content.strip(), list(example.calls)
    settings = {"reasoning_parser": "passthrough", "tool_call_parser": "passthrough", flag: name}
    if example.reasoning and flag == "tool_call_parser":
        settings["reasoning_parser"] = name
    async with http_client(engine, **settings) as http:
        whole = (await http.post("/v1/responses", json=responses)).json()
        assert of_items(whole["output"]) == expected
        typed = typed_events((await http.post("/v1/responses", json={**responses, "stream": True})).text)
        assert of_items(typed[-1]["response"]["output"]) == expected
        message = (await http.post("/v1/messages", json=messages)).json()
        assert of_blocks(message) == expected
        assert message["stop_reason"] == ("tool_use" if example.calls else "end_turn")
        stream = await http.post("/v1/messages", json={**messages, "stream": True})
        assert of_blocks(assembled(typed_events(stream.text))) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>[1]"),
        ("qwen", '<tool_call>{"name":"f","arguments":[1]}</tool_call>'),
        ("qwen", '<tool_call>{"name":"f","arguments":"[1]"}</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ],
)
async def test_arguments_that_are_no_object_make_no_call(engine: FakeClient, name: str, text: str):
    """The bug: a whole call in chat, an incomplete item in Responses, and in Messages nothing or, streamed, a block."""
    engine.reply, engine.max_model_len = text, 10_000
    user = [{"role": "user", "content": "hi"}]
    function, flat = {"name": "f", "parameters": {"type": "object"}}, {"type": "function", "name": "f"}
    chat = {"model": "tiny", "messages": user, "tools": [{"type": "function", "function": function}]}
    messages = {"model": "tiny", "max_tokens": 200, "messages": user, "tools": [{"name": "f", "input_schema": {}}]}
    responses = {"input": "hi", "tools": [flat]}
    async with http_client(engine, reasoning_parser="passthrough", tool_call_parser=name) as http:
        choice = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        chunks = events((await http.post("/v1/chat/completions", json={**chat, "stream": True})).text)
        assert of_choice(choice) == of_chunks(chunks)[0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == text
        assert not choice["message"].get("tool_calls")
        whole = (await http.post("/v1/responses", json=responses)).json()
        streamed = typed_events((await http.post("/v1/responses", json={**responses, "stream": True})).text)
        for response in (whole, streamed[-1]["response"]):
            assert (response["status"], of_items(response["output"])) == ("completed", ("", text, []))
        message = (await http.post("/v1/messages", json=messages)).json()
        stream = await http.post("/v1/messages", json={**messages, "stream": True})
        for each in (message, assembled(typed_events(stream.text))):
            assert (each["stop_reason"], of_blocks(each)) == ("end_turn", ("", text, []))


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        (
            "qwen",
            '<tool_call>\n{"name":"f","arguments":{"a":1},"arguments":{"a":2}}\n</tool_call>',
            '{"a":2}}\n</tool_call>',
        ),
        ("qwen", '<tool_call>\n{"name":"f","arguments":{"a":1} oops', "oops"),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{"a":1} oops', "oops"),
    ],
)
@pytest.mark.parametrize("one_call", [False, True])
async def test_a_malformed_call_is_malformed_in_every_api(
    engine: FakeClient, name: str, text: str, rest: str, one_call: bool
):
    """The bug: where its arguments happened to be JSON, Responses said `completed` and Messages gave a `tool_use` block
    that had `end_turn` behind it; chat said `stop`."""
    engine.reply, engine.max_model_len, engine.chunk = text, 10_000, 3
    user, parallel = [{"role": "user", "content": "hi"}], {"parallel_tool_calls": not one_call}
    function, flat = {"name": "f", "parameters": {"type": "object"}}, {"type": "function", "name": "f"}
    chat = {"model": "tiny", "messages": user, "tools": [{"type": "function", "function": function}], **parallel}
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": one_call}}
    messages = {"model": "tiny", "max_tokens": 200, "messages": user, "tools": [{"name": "f", "input_schema": {}}]}
    responses = {"input": "hi", "tools": [flat], **parallel}
    async with http_client(engine, reasoning_parser="passthrough", tool_call_parser=name) as http:
        answer = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        chunks = events((await http.post("/v1/chat/completions", json={**chat, "stream": True})).text)
        for each in (of_choice(answer), of_chunks(chunks)[0]):
            assert (each.finish_reason, each.content, len(each.calls)) == ("stop", rest, 1)
        whole = (await http.post("/v1/responses", json=responses)).json()
        streamed = typed_events((await http.post("/v1/responses", json={**responses, "stream": True})).text)
        for response in (whole, streamed[-1]["response"]):
            found = [(item["type"], item["status"]) for item in response["output"]]
            assert found == [("function_call", "incomplete"), ("message", "completed")]
        message = (await http.post("/v1/messages", json={**messages, **choice})).json()
        assert (message["stop_reason"], of_blocks(message)) == ("end_turn", ("", rest, []))
        stream = await http.post("/v1/messages", json={**messages, **choice, "stream": True})
        assert assembled(typed_events(stream.text))["stop_reason"] == "end_turn"
