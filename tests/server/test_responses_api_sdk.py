"""The official openai SDK's Responses client against a real uvicorn server over the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fake_engine_client import FakeClient
from fake_server import running, until
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall, ResponseReasoningItem
from test_responses_api import CALLS, PARSERS, THINKS

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@asynccontextmanager
async def sdk(engine: FakeClient, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(engine, api_keys=("k",), **{**PARSERS, **settings}) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def test_whole(engine: FakeClient):
    engine.reply = f"{THINKS}hello"
    async with sdk(engine) as client:
        response = await client.responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert response.output_text == "hello" and response.status == "completed" and response.metadata == {"a": "b"}
    reasoning = response.output[0]
    assert isinstance(reasoning, ResponseReasoningItem) and reasoning.content and reasoning.content[0].text == "hm"
    assert response.usage and response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response._request_id == response.id == engine.requests[0].request_id


async def test_stream(engine: FakeClient):
    engine.reply = f"{THINKS}hello"
    async with sdk(engine) as client, client.responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert response.output_text == "hello" and response.usage and response.usage.output_tokens > 0
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    texts = [event for event in events if event.type == "response.output_text.delta"]
    assert texts[-1].snapshot == "hello"
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [True, False])
async def test_an_agents_loop_with_stored_responses(engine: FakeClient, stream: bool):
    engine.reply = f"{THINKS}{CALLS}"
    async with sdk(engine) as client:
        if stream:
            async with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as events:
                first: Any = await events.get_final_response()
        else:
            first = await client.responses.create(model="tiny", input="hi", tools=[WEATHER])
        call = first.output[-1]
        assert isinstance(call, ResponseFunctionToolCall) and json.loads(call.arguments) == {"city": "Oslo"}
        engine.reply = "cold"
        second = await client.responses.create(
            model="tiny",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "-3"}],
            tools=[WEATHER],
        )
        assert second.output_text == "cold"
        again = await client.responses.retrieve(first.id)
        assert again.output[-1].id == call.id
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.type for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(second.id)
    (_, assistant, tool) = engine.rendered[-1]["messages"]
    assert assistant["reasoning_content"] == "hm" and assistant["tool_calls"][0]["id"] == call.call_id
    assert tool == {"role": "tool", "content": "-3", "tool_call_id": call.call_id}


async def test_an_agents_loop_that_sends_everything_back(engine: FakeClient):
    """Output items go back as the SDK's objects, as coding agents do with `store: false`."""
    engine.reply = f"{THINKS}{CALLS}"
    async with sdk(engine) as client:
        talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        fields: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "store": False}
        fields |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high", "summary": "auto"}}
        first = await client.responses.create(input=talk, **fields)
        call = first.output[-1]
        assert isinstance(call, ResponseFunctionToolCall)
        talk += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}]
        engine.reply = "cold"
        second = await client.responses.create(input=talk, **fields)
        assert second.output_text == "cold"
    assert [message["role"] for message in engine.rendered[-1]["messages"]] == ["user", "assistant", "tool"]
    assert engine.rendered[-1]["messages"][1]["reasoning_content"] == "hm"


class City(pydantic.BaseModel):
    name: str


async def test_parsed_text(engine: FakeClient):
    engine.reply = 'hm</think>{"name": "Oslo"}'  # with a grammar, the prompt opens the reasoning
    async with sdk(engine) as client:
        response = await client.responses.parse(model="tiny", input="hi", text_format=City)
    assert response.output_parsed == City(name="Oslo")
    assert engine.requests[0].grammar is not None and "name" in engine.requests[0].grammar.text


async def test_the_limit(engine: FakeClient):
    async with sdk(engine) as client:
        response = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
        assert response.status == "incomplete" and response.output_text == "hel"
        assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
        stream = await client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_errors(engine: FakeClient):
    async with sdk(engine) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model="tiny", input="hi", background=True)
        assert bad.value.param == "background"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").responses.create(model="tiny", input="hi")
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_none")
        assert gone.value.code == "previous_response_not_found"
        engine.fail_after = 2
        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
        assert events[-1].type == "response.failed" and events[-1].response.error
        assert "NaN" in events[-1].response.error.message
        engine.fail_after = 0
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="tiny", input="hi")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_closes_the_engines_request(engine: FakeClient, stream: bool):
    engine.reply = "x" * 100
    engine.gate = asyncio.Event()
    async with running(engine) as server, httpx.AsyncClient(base_url=server.url) as http:
        asking = asyncio.create_task(http.post("/v1/responses", json={"input": "hi", "stream": stream}))
        await until(lambda: bool(engine.running))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.running)
        assert engine.closed_early == [engine.requests[0].request_id]
        assert (await http.get(f"/v1/responses/{engine.requests[0].request_id}")).status_code == 404
