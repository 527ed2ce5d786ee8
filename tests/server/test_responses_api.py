"""POST /v1/responses over a fake engine: fields, items, order of events, the shape of errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from app_client import http_client
from fake_engine_client import FakeClient

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.carried import pack
from tokenspeed.server.responses_api.conversation import plain_input, to_messages
from tokenspeed.server.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)
from tokenspeed.server.responses_api.request import NOT_OFFERED, RESPONSES_REFUSED
from tokenspeed.text.messages import in_parts
from tokenspeed.text.parsers.model_json import json_object

URL = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
THINKS = "<think>hm</think>"
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}


def typed_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is its type, and nothing follows the last."""
    found = []
    for chunk in text.removesuffix("\n\n").split("\n\n"):
        name, data = chunk.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def streamed(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await http.post(URL, json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    found = typed_events(response.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_whole_answer(http: httpx.AsyncClient, engine: FakeClient):
    response = await http.post(URL, json={"model": "tiny", "input": "hi", "metadata": {"a": "b"}})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == body["id"] == engine.requests[0].request_id
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["status"] == "completed"
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }
    assert body["metadata"] == {"a": "b"} and body["store"] is True and body["error"] is None
    assert body["completed_at"] >= body["created_at"]


async def test_order_of_events(engine: FakeClient):
    engine.reply = f"{THINKS}\n\nok {CALLS}"
    async with http_client(engine, **PARSERS) as http:
        events = await streamed(http, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = ("reasoning_text.delta", "output_text.delta", "function_call_arguments.delta")
    order = [kind for at, kind in enumerate(kinds) if kind not in deltas or kinds[at - 1] != kind]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message, call = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    assert message["content"][0]["text"].strip() == "ok"
    assert json.loads(call["arguments"]) == {"city": "Oslo"} and call["name"] == "weather"
    assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [reasoning, message, call]
    for item, kind in ((reasoning, deltas[0]), (message, deltas[1]), (call, deltas[2])):
        pieces = [event for event in events if event["type"] == f"response.{kind}"]
        assert {event["item_id"] for event in pieces} == {item["id"]}
        whole = item["arguments"] if item is call else item["content"][0]["text"]
        assert "".join(event["delta"] for event in pieces) == whole
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("reply", ["hello", THINKS + "x", CALLS, f"{THINKS}{CALLS}{CALLS}", "", " \n", "<tool_call>{"])
@pytest.mark.parametrize("interval", [1, 4])
async def test_streamed_and_whole_are_the_same(engine: FakeClient, reply: str, interval: int):
    engine.reply = reply
    async with http_client(engine, stream_interval=interval, **PARSERS) as http:
        events = await streamed(http, tools=[WEATHER])
        whole = (await http.post(URL, json={"input": "hi", "tools": [WEATHER]})).json()
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{key: item[key] for key in item if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_the_limit_makes_it_incomplete(engine: FakeClient):
    engine.reply = CALLS
    async with http_client(engine, **PARSERS) as http:
        events = await streamed(http, tools=[WEATHER], max_output_tokens=len(CALLS) - 20)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"] and response["completed_at"] is None


@pytest.mark.parametrize("arguments", ["", '{"cut', "{}", '{"city": "Oslo"}'])
@pytest.mark.parametrize("status", ["incomplete", "completed", None])
def test_a_cut_call_is_not_part_of_what_follows(arguments: str, status: Any):
    """The bug: a call cut before its arguments was shown to the model as one without arguments, and one cut behind
    them as whole."""
    call = FunctionCallItem(call_id="1", name="f", arguments=arguments, status=status)
    items: list[Item] = [MessageItem(role="user", content="hi"), call, MessageItem(role="user", content="and")]
    if status != "incomplete" and arguments == '{"cut':
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            to_messages(items, None)
        return
    made = [message["tool_calls"][0]["function"] for message in to_messages(items, None) if "tool_calls" in message]
    whole = {"name": "f", "arguments": json.loads(arguments or "{}")} if status != "incomplete" else None
    assert made == ([] if whole is None else [whole])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_limit_cut_is_not_shown_again(engine: FakeClient, stream: bool):
    """At every length: sent as input, and by the response's id."""
    engine.reply = CALLS
    seen = []
    async with http_client(engine, **PARSERS) as http:
        for limit in (*range(CALLS.index("{"), len(CALLS) + 1, 7), len(CALLS), len(CALLS) + 1):
            body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": limit, "stream": stream}
            answer = await http.post(URL, json=body)
            response = typed_events(answer.text)[-1]["response"] if stream else answer.json()
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            statuses = [call["status"] for call in calls]
            seen.append((statuses, [json_object(call["arguments"]) for call in calls]))
            again = {"tools": [WEATHER], "max_output_tokens": 1}
            follow = {"input": "and", "previous_response_id": response["id"]}
            assert (await http.post(URL, json={**again, **follow})).status_code == 200
            sent = [{"role": "user", "content": "hi"}, *response["output"], {"role": "user", "content": "and"}]
            assert (await http.post(URL, json={**again, "input": sent})).status_code == 200
            by_id, by_input = (shown["messages"] for shown in engine.rendered[-2:])
            assert by_id == by_input
            assert any("tool_calls" in message for message in by_id) is (statuses == ["completed"])
    assert (["incomplete"], [None]) in seen and (["incomplete"], [{"city": "Oslo"}]) in seen
    assert seen[-1] == (["completed"], [{"city": "Oslo"}])


async def test_at_most_one_call(engine: FakeClient):
    engine.reply = CALLS + CALLS
    async with http_client(engine, **PARSERS) as http:
        body = {"input": "hi", "tools": [WEATHER]}
        both = (await http.post(URL, json=body)).json()
        one = (await http.post(URL, json={**body, "parallel_tool_calls": False})).json()
    assert len(both["output"]) == 2 and len(one["output"]) == 1 and one["parallel_tool_calls"] is False


async def test_sampling_fields_arrive(http: httpx.AsyncClient, engine: FakeClient):
    body = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 3, "top_k": 7, "seed": 11, "ignore_eos": True}
    answer = (await http.post(URL, json={"input": "hi", **body})).json()
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 3)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (7, 11, True)
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 0.25, 3)


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", False), ("high", True), (None, None)])
async def test_effort_turns_the_templates_switch(engine: FakeClient, effort: str | None, thinks: bool | None):
    engine.template_variables = frozenset({"enable_thinking"})
    async with http_client(engine) as http:
        assert (await http.post(URL, json={"input": "hi", "reasoning": {"effort": effort}})).status_code == 200
    assert (engine.rendered[0]["template_kwargs"] or {}).get("enable_thinking") is thinks


async def test_text_formats_become_grammars(http: httpx.AsyncClient, engine: FakeClient):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given in (
        {"type": "json_schema", "name": "x", "schema": schema, "strict": True},
        {"type": "json_object"},
        {"type": "text"},
    ):
        response = await http.post(URL, json={"input": "hi", "text": {"format": given}})
        assert response.status_code == 200 and response.json()["text"]["format"] == given
    first, second, third = (request.grammar for request in engine.requests)
    assert first and first.kind == "json_schema" and "integer" in first.text
    assert second and second.kind == "json_schema" and third is None
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    response = await http.post(URL, json={"input": "hi", "text": {"format": bad}})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("text.format")


async def test_tool_choice(engine: FakeClient):
    engine.reply = 'hm</think>[{"name": "weather", "parameters": {"city": "Oslo"}}]'  # the prompt opens the reasoning
    other = {**WEATHER, "name": "other"}
    async with http_client(engine, **PARSERS) as http:
        for choice in ("required", {"type": "function", "name": "weather"}):
            body = {"input": "hi", "tools": [WEATHER, other], "tool_choice": choice}
            answer = (await http.post(URL, json=body)).json()
            assert [item.get("name") for item in answer["output"]] == [None, "weather"] and answer[
                "tool_choice"
            ] == choice
            assert engine.requests[-1].grammar is not None
        engine.reply = CALLS
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
        answer = (await http.post(URL, json={"input": "hi", "tools": [WEATHER, other], "tool_choice": allowed})).json()
        assert [item["type"] for item in answer["output"]] == ["message"]  # a call that is not allowed is text
        for bad in ("sometimes", {"type": "function", "name": "none"}, {"type": "web_search"}):
            body = {"input": "hi", "tools": [WEATHER], "tool_choice": bad}
            error = (await http.post(URL, json=body)).json()["error"]
            assert error["param"] in ("tool_choice", "tool_choice.type")


@pytest.mark.parametrize("kind", sorted(NOT_OFFERED))
async def test_tools_that_are_no_functions_are_left_out(engine: FakeClient, kind: str):
    engine.reply = CALLS
    other = {"type": kind, "name": "weather", "anything": [1]}
    async with http_client(engine, **PARSERS) as http:
        answer = (await http.post(URL, json={"input": "hi", "tools": [other, WEATHER]})).json()
        assert [tool["function"]["name"] for tool in engine.rendered[0]["tools"]] == ["weather"]
        assert [(tool["type"], tool["name"]) for tool in answer["tools"]] == [("function", "weather")]
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        alone = (await http.post(URL, json={"input": "hi", "tools": [other]})).json()
        assert engine.rendered[1]["tools"] is None and [item["type"] for item in alone["output"]] == ["message"]
        forced = await http.post(URL, json={"input": "hi", "tools": [other, WEATHER], "tool_choice": {"type": kind}})
        assert forced.status_code == 400 and forced.json()["error"]["param"] == "tool_choice"
        assert repr(kind) in forced.json()["error"]["message"]


@pytest.mark.parametrize("name", sorted(RESPONSES_REFUSED))
async def test_refused_fields_are_named(http: httpx.AsyncClient, name: str):
    neutral, _ = RESPONSES_REFUSED[name]
    for value in neutral:
        assert (await http.post(URL, json={"input": "hi", name: value})).status_code == 200
    response = await http.post(URL, json={"input": "hi", name: "something else"})
    assert response.status_code == 400 and response.json()["error"]["param"] == name


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "1"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "temperature": 3}, "temperature"),
        ({"input": "hi", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "hi", "reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": "hi", "text": {"verbosity": "lowest"}}, "text.verbosity"),
        ({"input": "hi", "client_metadata": {"a": 1}}, "client_metadata"),
        ({"input": "hi", "instructions": [{"role": "system", "content": "a"}]}, "instructions"),
        ({"input": "hi", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": "hi", "text": {"format": {"type": "text", "name": "a"}}}, "text.format.name"),
        ({"input": "hi", "tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"input": "hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "zzz": 1}},
            "tool_choice.zzz",
        ),
        (
            {
                "input": "hi",
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather", "zzz": 1}],
                },
            },
            "tool_choice.tools[0].zzz",
        ),
        (
            {
                "input": "hi",
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
            },
            "tool_choice",
        ),
        ({"input": "hi", "tools": [{"type": "function", "name": "f"}] * 2}, "tools[1]"),
        ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "hi", "stream_options": {}}, "stream_options"),
        ({"input": "hi", "metadata": {"a": "x" * 513}}, "metadata"),
        ({"input": "hi", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "hi", "n": 2}, "n"),
        ({"input": "hi", "priority": 1}, "priority"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        # The bug: two calls, or two outputs, of one id were taken, and which belonged to which was left to chance.
        ({"input": [CALL, CALL]}, "input[1].call_id"),
        ({"input": [CALL, OUTPUT, OUTPUT]}, "input[2].call_id"),
        ({"input": [CALL, OUTPUT, CALL]}, "input[2].call_id"),
    ],
)
async def test_errors_name_the_field(http: httpx.AsyncClient, engine: FakeClient, body: dict[str, Any], param: str):
    response = await http.post(URL, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert response.json()["error"]["type"] == "invalid_request_error" and not engine.requests


async def test_an_unknown_model_is_404(http: httpx.AsyncClient):
    response = await http.post(URL, json={"input": "hi", "model": "other"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("knob", ["fail_after", "vanish_after", "boom_after"])
async def test_a_failure_under_way_is_the_last_event(engine: FakeClient, knob: str):
    setattr(engine, knob, 2)
    async with http_client(engine) as http:
        events = await streamed(http)
        assert (await http.get(f"{URL}/{events[0]['response']['id']}")).status_code == 404
        setattr(engine, knob, 0)
        assert (await http.post(URL, json={"input": "hi", "stream": True})).status_code == 500
        assert (await http.post(URL, json={"input": "hi"})).status_code == 500
    assert [event["type"] for event in events].count("response.failed") == 1
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error" and events[-1]["response"]["error"]["message"]
    assert not engine.running


async def test_reasoning_survives_clients_that_drop_its_text(engine: FakeClient):
    engine.reply = f"{THINKS}x"
    async with http_client(engine, **PARSERS) as http:
        body = {"input": "hi", "store": False, "include": ["reasoning.encrypted_content"]}
        reasoning, message = (await http.post(URL, json=body)).json()["output"]
        del reasoning["content"]
        again = [{"role": "user", "content": "hi"}, reasoning, message, {"role": "user", "content": "and"}]
        assert (await http.post(URL, json={**body, "input": again})).status_code == 200
    assert engine.rendered[-1]["messages"][1] == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_items_become_messages():
    items: list[Item] = [
        MessageItem(role="developer", content=[InputText(text="a"), InputText(text="b")]),
        MessageItem(role="user", content="hi"),
        ReasoningItem(content=[ReasoningText(text="hm")]),
        MessageItem(role="assistant", content=[OutputText(text="one moment")]),
        FunctionCallItem(call_id="1", name="f", arguments='{"x": 1}'),
        FunctionCallItem(call_id="2", name="g", arguments=""),
        FunctionCallItem(call_id="3", name="h", arguments='{"cut', status="incomplete"),
        FunctionCallOutputItem(call_id="1", output="yes"),
        FunctionCallOutputItem(call_id="2", output=[InputText(text="no")]),
        ReasoningItem(encrypted_content=pack("so")),
        ReasoningItem(encrypted_content="gAAAAAB of another server"),
        ReasoningItem(encrypted_content="gAAAAAB", summary=[SummaryText(text=", in short")]),
        MessageItem(role="assistant", content="done"),
        MessageItem(role="assistant", content=[OutputText(text="really"), Refusal(refusal="not")]),
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert to_messages(items, "be brief") == [
        {"role": "system", "content": "be brief\n\na\nb"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
        {"role": "tool", "content": "no", "tool_call_id": "2"},
        {"role": "assistant", "content": "done", "reasoning_content": "so, in short"},
        {"role": "assistant", "content": in_parts(["really", "not"])},
    ]
    with pytest.raises(InvalidRequest, match="call_id '3'"):
        to_messages([*items, FunctionCallOutputItem(call_id="3", output="")], None)


def test_inputs_are_taken_as_sdks_write_them():
    assert plain_input("hi") == [{"type": "message", "role": "user", "content": "hi"}]
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
    refusal = {"type": "refusal", "refusal": "no"}
    given = {"role": "assistant", "content": [part, refusal], "id": None, "namespace": None}
    parts = [{"type": "output_text", "text": "a", "annotations": []}, refusal]
    assert plain_input([given]) == [{"type": "message", "role": "assistant", "content": parts}]


async def test_logprobs_of_an_input_change_nothing(http: httpx.AsyncClient, engine: FakeClient):
    """Clients send answers back as they got them, from other servers, too."""
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [{"token": "a", "logprob": -0.5}]}
    talk: list[Any] = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "b"}]
    assert (await http.post(URL, json={"input": talk})).status_code == 200
    assert [message["content"] for message in engine.rendered[0]["messages"]] == ["a", "b"]
    part["annotations"] = [{"type": "file_citation"}]
    refused = await http.post(URL, json={"input": talk})
    assert refused.status_code == 400 and "annotations cannot be used" in refused.text
