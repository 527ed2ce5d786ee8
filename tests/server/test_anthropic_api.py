"""POST /v1/messages and count_tokens over a fake engine: fields, blocks, order of events, the shape of errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from app_client import http_client
from fake_engine_client import FakeClient
from test_responses_api import CALLS, PARSERS, THINKS, typed_events

from tokenspeed.protocol.errors import InvalidRequest, Overloaded
from tokenspeed.server.anthropic.errors import to_error
from tokenspeed.server.anthropic.request import MESSAGES_REFUSED
from tokenspeed.server.carried import pack

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {}}}}


def body(**fields: Any) -> dict[str, Any]:
    """A small request."""
    return {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **fields}


async def streamed(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(URL, json=body(stream=True, **fields))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return typed_events(response.text)


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, blocks one after the other."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    texts: list[str] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]) == len(texts)
            message["content"].append(event["content_block"])
            texts.append("")
            continue
        assert event["index"] == len(texts) - 1
        block = message["content"][-1]
        match event.get("delta"):
            case {"type": "text_delta", "text": more}:
                block["text"] += more
            case {"type": "thinking_delta", "thinking": more}:
                block["thinking"] += more
            case {"type": "signature_delta", "signature": signature}:
                block["signature"] = signature
            case {"type": "input_json_delta", "partial_json": more}:
                texts[-1] += more
            case None:
                assert event["type"] == "content_block_stop"
                if block["type"] == "tool_use":
                    block["input"] = json.loads(texts[-1])
    assert events[-2]["type"] == "message_delta"
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


async def test_whole_answer(http: httpx.AsyncClient, engine: FakeClient):
    response = await http.post(URL, json=body(), headers={"anthropic-version": "2023-06-01"})
    message = response.json()
    assert response.status_code == 200
    assert response.headers["request-id"] == message.pop("id") == engine.requests[0].request_id
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_order_of_events(engine: FakeClient):
    engine.reply = f"{THINKS}\n\nok {CALLS}"
    async with http_client(engine, **PARSERS) as http:
        events = await streamed(http, tools=[WEATHER])
    kinds = [event["type"] if "delta" not in event else event["delta"].get("type", "end") for event in events]
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind] == [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "content_block_start",
        "input_json_delta",
        "content_block_stop",
        "end",
        "message_stop",
    ]
    thinking, text, call = assembled(events)["content"]
    assert thinking["thinking"] == "hm" and thinking["signature"] and text["text"].strip() == "ok"
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("reply", ["hello", THINKS + "x", CALLS, f"{THINKS}{CALLS}{CALLS}", "", " \n"])
@pytest.mark.parametrize("interval", [1, 4])
async def test_streamed_and_whole_are_the_same(engine: FakeClient, reply: str, interval: int):
    engine.reply = reply
    async with http_client(engine, stream_interval=interval, **PARSERS) as http:
        parts = assembled(await streamed(http, tools=[WEATHER]))
        whole = (await http.post(URL, json=body(tools=[WEATHER]))).json()
    for message in (parts, whole):
        message["id"] = ""
        for block in message["content"]:
            block.pop("id", None)
    assert parts == whole


async def test_input_is_what_the_model_wrote(engine: FakeClient):
    """The bug: a number beyond a float's range was null."""
    engine.reply = CALLS.replace('"Oslo"', "[1e400, 12345678901234567890123]")
    async with http_client(engine, **PARSERS) as http:
        answer = await http.post(URL, json=body(tools=[WEATHER]))
    assert '"input":{"city": [1e400, 12345678901234567890123]}' in answer.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_cut_is_no_call(engine: FakeClient, stream: bool):
    engine.reply = CALLS
    cut = len(CALLS) - 20
    async with http_client(engine, **PARSERS) as http:
        if stream:
            events = await streamed(http, tools=[WEATHER], max_tokens=cut)
            assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        else:
            message = (await http.post(URL, json=body(tools=[WEATHER], max_tokens=cut))).json()
            assert message["stop_reason"] == "max_tokens" and message["content"] == []


async def test_stop_sequences(http: httpx.AsyncClient):
    message = (await http.post(URL, json=body(stop_sequences=["x", "lo"]))).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "lo")
    assert message["content"] == [{"type": "text", "text": "hel"}]
    events = await streamed(http, stop_sequences=["lo"])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "lo"}


async def test_conversations_become_messages(http: httpx.AsyncClient, engine: FakeClient):
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "text", "text": "one moment", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "yes"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": pack("so")}]},
        {"role": "user", "content": "b"},
    ]
    header = {"type": "text", "text": "x-anthropic-billing-header: n=1"}
    system = [header, {"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    fields = {"metadata": {"user_id": "u"}, "tools": [{**WEATHER, "description": "now", "type": "custom"}]}
    engine.max_model_len = 1000
    async with http_client(engine, **PARSERS) as client:
        response = await client.post(URL, json=body(messages=talk, system=system, **fields))
    assert response.status_code == 200, response.text
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert engine.rendered[0]["messages"] == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "yes", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "t2"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
        {"role": "user", "content": "b"},
    ]
    function = {"name": "weather", "description": "now", "parameters": WEATHER["input_schema"]}
    assert engine.rendered[0]["tools"] == [{"type": "function", "function": function}]


async def test_texts_of_a_message_stay_apart(http: httpx.AsyncClient, engine: FakeClient):
    """The bug: they became one text before the chat template, which may know parts, had seen them."""
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    two = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": two, "is_error": True}
    talk = [{"role": "user", "content": two}, {"role": "assistant", "content": [*two, use]}]
    asked = body(max_tokens=5, messages=[*talk, {"role": "user", "content": [result]}])
    answer = await http.post(URL, json=asked)
    assert answer.status_code == 200, answer.text
    contents = [message["content"] for message in engine.rendered[0]["messages"]]
    assert contents == [two, two, [{"type": "text", "text": "Error: x"}, two[1]]]


async def test_a_last_assistant_message_is_continued(http: httpx.AsyncClient, engine: FakeClient):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("}]
    assert (await http.post(URL, json=body(messages=talk))).status_code == 200
    assert engine.rendered[0]["continue_final_message"] is True and engine.rendered[0]["add_generation_prompt"] is False


async def test_a_last_message_with_calls_is_not_continued(http: httpx.AsyncClient, engine: FakeClient):
    """Its calls were dropped, and its text went on as if there were none."""
    blocks = [{"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "1", "name": "weather", "input": {}}]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}]
    answer = await http.post(URL, json=body(messages=talk))
    assert answer.status_code == 400 and "send the calls' results" in answer.json()["error"]["message"]
    assert not engine.requests


async def test_omitted_thinking_is_in_the_signature(engine: FakeClient):
    engine.reply = f"{THINKS}x"
    thinking = {"type": "enabled", "budget_tokens": 100, "display": "omitted"}
    async with http_client(engine, **PARSERS) as http:
        message = (await http.post(URL, json=body(thinking=thinking))).json()
        events = await streamed(http, thinking=thinking)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": pack("hm")}
    assert assembled(events)["content"] == message["content"]


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({"type": "enabled", "budget_tokens": 100}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        (None, None),
    ],
)
async def test_thinking_turns_the_templates_switch(engine: FakeClient, thinking: Any, thinks: bool | None):
    engine.template_variables = frozenset({"enable_thinking"})
    async with http_client(engine) as http:
        assert (await http.post(URL, json=body(thinking=thinking))).status_code == 200
    assert (engine.rendered[0]["template_kwargs"] or {}).get("enable_thinking") is thinks


async def test_tool_choice(engine: FakeClient):
    forced = 'hm</think>[{"name": "weather", "parameters": {"city": "Oslo"}}]'
    async with http_client(engine, **PARSERS) as http:
        for choice, reply, reason in (
            ({"type": "any"}, forced, "tool_use"),
            ({"type": "tool", "name": "weather"}, forced, "tool_use"),
            ({"type": "auto"}, CALLS, "tool_use"),
            ({"type": "none"}, CALLS, "end_turn"),
        ):
            engine.reply = reply
            message = (await http.post(URL, json=body(tools=[WEATHER], tool_choice=choice))).json()
            assert message["stop_reason"] == reason, choice
            assert (engine.requests[-1].grammar is not None) == (choice["type"] in ("any", "tool"))
        engine.reply = CALLS + CALLS
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = (await http.post(URL, json=body(tools=[WEATHER], tool_choice=choice))).json()
        assert len(message["content"]) == 1 and message["stop_reason"] == "tool_use"


async def test_auto_without_a_known_format_is_refused_in_this_apis_words():
    """The error named OpenAI's "required", which is no value of this API's `tool_choice`."""
    async with http_client(FakeClient()) as http:
        response = await http.post(URL, json=body(tools=[WEATHER]))
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "send tool_choice none, any or tool, or" in message
    assert "required" not in message and "--chat-template" in message


async def test_output_format_is_a_grammar(http: httpx.AsyncClient, engine: FakeClient):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert (await http.post(URL, json=body(output_config=config))).status_code == 200
    grammar = engine.requests[0].grammar
    assert grammar is not None and grammar.kind == "json_schema" and "integer" in grammar.text


async def test_sampling_fields_arrive(http: httpx.AsyncClient, engine: FakeClient):
    assert (await http.post(URL, json=body(temperature=0.5, top_p=0.25, top_k=7, max_tokens=3))).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 3)


@pytest.mark.parametrize("name", sorted(MESSAGES_REFUSED))
async def test_refused_fields_are_named(http: httpx.AsyncClient, name: str):
    neutral, _ = MESSAGES_REFUSED[name]
    for value in neutral:
        assert (await http.post(URL, json=body(**{name: value}))).status_code == 200
    response = await http.post(URL, json=body(**{name: "something else"}))
    assert response.status_code == 400 and name in response.json()["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


ASKED = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] is of type 'image'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is null"),
        ({"temperature": 1.5}, "temperature is 1.5"),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens is 200"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not among tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools holds two functions of the name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"n": 2}, "unknown field 'n'"),
        # The bug: two calls, or two results, of one id were taken, and which belonged to which was left to chance.
        ({"messages": [ASKED, {"role": "assistant", "content": [USE, USE]}]}, "messages[1].content[1]"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT] * 2}]},
            "messages[2].content[1]",
        ),
    ],
)
async def test_invalid_requests(http: httpx.AsyncClient, engine: FakeClient, fields: dict[str, Any], words: str):
    response = await http.post(URL, json=body(**fields))
    error = response.json()
    assert response.status_code == 400, response.text
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"] and not engine.requests


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "tool_result", "tool_use_id": "t", "content": ""}], "no tool_use with id 't'"),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": {}}], "only a message of role assistant"),
        ([{"type": "thinking", "thinking": "hm"}], "only a message of role assistant"),
        ([{"type": "redacted_thinking", "data": "x"}], "only a message of role assistant"),
    ],
)
async def test_blocks_have_their_place(http: httpx.AsyncClient, content: Any, words: str):
    response = await http.post(URL, json=body(messages=[{"role": "user", "content": content}]))
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def check_id(response: httpx.Response, prefix: str = "") -> None:
    """An error names its request, in the body and in the header that SDKs read."""
    error = response.json()
    assert error["type"] == "error" and len(error["request_id"]) > 30 and error["request_id"].startswith(prefix)
    assert response.headers["request-id"] == response.headers["x-request-id"] == error["request_id"]


async def test_every_error_has_its_shape_and_an_id(http: httpx.AsyncClient, engine: FakeClient):
    """The bug: `"request_id": null`, no header, and OpenAI's shape where no endpoint was reached."""
    for bad in ({"max_tokens": 0}, {"nonsense": 1}, {"model": "other"}):
        check_id(await http.post(URL, json=body(**bad)), "msg_")
    check_id(await http.post(URL, content=b"{", headers={"content-type": "application/json"}), "msg_")
    check_id(await http.post(COUNT, json={}), "req_")
    count = await http.post(COUNT, json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert count.status_code == 200 and count.headers["request-id"].startswith("req_")
    for method, url, status, kind in (
        ("GET", URL, 405, "invalid_request_error"),
        ("DELETE", COUNT, 405, "invalid_request_error"),
        ("POST", f"{URL}/batches", 404, "not_found_error"),
    ):
        response = await http.request(method, url)
        check_id(response, "req_")
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert url in response.json()["error"]["message"]
    assert (await http.get("/v1/chat/completions")).json()["error"]["code"] == "method_not_allowed"
    engine.fail_after = 2
    events = await streamed(http)
    assert events[-1]["request_id"] == events[0]["message"]["id"]


async def test_statuses(engine: FakeClient):
    async with http_client(engine, api_keys=("k",), max_request_bytes=4000) as http:
        key = {"x-api-key": "k"}

        async def status(headers: dict[str, str], **fields: Any) -> tuple[int, str]:
            response = await http.post(URL, json=body(**fields), headers=headers)
            if response.status_code != 200:
                check_id(response)
            return response.status_code, response.json().get("error", {}).get("type", "")

        assert await status({}) == (401, "authentication_error")
        assert await status({"x-api-key": "wrong"}) == (401, "authentication_error")
        assert await status(key) == (200, "") and await status({"authorization": "Bearer k"}) == (200, "")
        assert await status({"x-api-key": "k", "authorization": "Bearer wrong"}) == (200, "")
        assert await status(key, model="other") == (404, "not_found_error")
        assert await status(key, system="x" * 4000) == (413, "request_too_large")
        engine.refuse = Overloaded("full", 3)
        assert await status(key) == (429, "rate_limit_error")
        engine.refuse = Overloaded("going", 3, draining=True)
        assert await status(key) == (529, "overloaded_error")
        engine.refuse = None
        engine.fail_after = 0
        assert await status(key) == (500, "api_error")
        engine.is_alive = False
        assert (await status(key))[0] == 503
        chat = await http.post("/v1/chat/completions", json={}, headers={})
        assert chat.status_code == 401 and chat.json()["error"]["code"] == "invalid_api_key"


async def test_a_body_without_a_length_is_bounded_too(engine: FakeClient):
    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 1000

    async with http_client(engine, max_request_bytes=4000) as http:
        response = await http.post(URL, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"


async def test_a_long_prompt_is_refused_in_words_that_agents_know(http: httpx.AsyncClient):
    response = await http.post(URL, json=body(system="x" * 400))
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("prompt is too long: ")


async def test_a_prompt_that_fits_is_not_called_too_long(http: httpx.AsyncClient):
    """By these words agents compact a conversation, which is of no use against a max_tokens that is too large."""
    response = await http.post(URL, json=body(max_tokens=5000))
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "prompt is too long" not in message
    assert "max_tokens" in message


def test_only_what_is_said_of_the_prompt_begins_with_these_words():
    for param, is_prompt in (("prompt", True), ("messages", True), ("max_tokens", False), ("min_tokens", False)):
        _, error = to_error(InvalidRequest("5 is too much", param, "context_length_exceeded"), "req_1")
        assert error.error.message.startswith("prompt is too long") == is_prompt


@pytest.mark.parametrize("knob", ["fail_after", "vanish_after", "boom_after"])
async def test_a_failure_under_way_is_the_last_event(engine: FakeClient, knob: str):
    setattr(engine, knob, 2)
    async with http_client(engine) as http:
        events = await streamed(http)
    assert [event["type"] for event in events].count("error") == 1 and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error" and events[-1]["error"]["message"]
    assert not engine.running


async def test_a_coding_agents_request(engine: FakeClient):
    """All that such clients send at once; nothing of it may be refused."""
    engine.reply, engine.max_model_len = f"{THINKS}{CALLS}", 10_000
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {**WEATHER, "description": "now", "eager_input_streaming": True, "strict": True, **cached}
    fields = {
        "max_tokens": 4000,
        "temperature": 1,
        "system": [{"type": "text", "text": "be brief", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        "tools": [tool, {**tool, "name": "shell"}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 3999},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2025-01-01"}
    async with http_client(engine, **PARSERS) as http:
        response = await http.post(f"{URL}?beta=true", json=body(**fields), headers=headers)
    assert response.status_code == 200, response.text
    assert assembled(typed_events(response.text))["stop_reason"] == "tool_use"
