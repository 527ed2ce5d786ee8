"""The official anthropic SDK against a real uvicorn server over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, ToolParam
from fake_engine_client import FakeClient
from fake_server import running, until
from test_responses_api import CALLS, PARSERS, THINKS

HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "how it is outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@asynccontextmanager
async def sdk(engine: FakeClient, **settings: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        running(engine, api_keys=("k",), **{**PARSERS, **settings}) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        yield client


async def test_whole(engine: FakeClient):
    engine.reply = f"{THINKS}hello"
    async with sdk(engine) as client:
        message = await client.messages.create(
            model="tiny", max_tokens=100, messages=HI, system="be brief", metadata={"user_id": "u"}
        )
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking == "hm"
    assert text.type == "text" and text.text == "hello"
    assert message.stop_reason == "end_turn" and message.usage.cache_read_input_tokens == 2
    assert message._request_id == message.id == engine.requests[0].request_id


async def test_stream(engine: FakeClient):
    engine.reply = f"{THINKS}hello"
    async with sdk(engine) as client, client.messages.stream(model="tiny", max_tokens=100, messages=HI) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and {"thinking", "text"} <= set(kinds)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == len(engine.reply) + 1
    assert message.usage.output_tokens_details and message.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_agents_loop(engine: FakeClient, stream: bool):
    engine.reply = f"{THINKS}I look {CALLS}"
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 180, "tools": [WEATHER]}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 100}
    async with sdk(engine) as client:
        if stream:
            async with client.messages.stream(messages=HI, **fields) as events:
                first: Any = await events.get_final_message()
        else:
            first = await client.messages.create(messages=HI, **fields)
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert call.type == "tool_use" and call.name == "weather" and call.input == {"city": "Oslo"}
        engine.reply = f"{THINKS}cold"  # a budget makes sure that it reasons: the prompt opens it
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3"}]}
        talk = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=talk, **fields)
        assert [block.type for block in second.content] == ["thinking", "text"]
        assert second.content[1].text == "cold"
        counted = await client.messages.count_tokens(
            model="tiny", messages=talk, tools=[WEATHER], thinking=fields["thinking"]
        )
        used = second.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    (_, assistant, tool) = engine.rendered[-1]["messages"]
    assert assistant["reasoning_content"] == "hm" and assistant["content"].strip() == "I look"
    assert tool == {"role": "tool", "content": "-3", "tool_call_id": call.id}


async def test_a_cut_call_in_a_stream(engine: FakeClient):
    engine.reply = CALLS
    async with sdk(engine) as client:
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": len(CALLS) - 16, "tools": [WEATHER]}
        async with client.messages.stream(messages=HI, **fields) as events:
            message = await events.get_final_message()
    assert message.stop_reason == "max_tokens"


async def test_stop_sequences(engine: FakeClient):
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI, "stop_sequences": ["lo"]}
    async with sdk(engine) as client, client.messages.stream(**fields) as events:
        message = await events.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")


async def test_errors(engine: FakeClient):
    async with sdk(engine) as client:
        ask: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**ask, extra_body={"temperature": 1.5})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ask, "model": "other"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**ask)
        async with anthropic.AsyncAnthropic(base_url=client.base_url, auth_token="k", max_retries=0) as bearer:
            assert (await bearer.messages.create(**ask)).stop_reason == "end_turn"
        engine.fail_after = 2
        with pytest.raises(anthropic.APIError, match="NaN"):
            async for _ in await client.messages.create(**ask, stream=True):
                pass
        engine.fail_after = 0
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(**ask)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_closes_the_engines_request(engine: FakeClient, stream: bool):
    engine.reply = "x" * 100
    engine.gate = asyncio.Event()
    body = {"model": "tiny", "max_tokens": 100, "messages": HI, "stream": stream}
    async with running(engine) as server, httpx.AsyncClient(base_url=server.url) as http:
        asking = asyncio.create_task(http.post("/v1/messages", json=body))
        await until(lambda: bool(engine.running))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.running)
        assert engine.closed_early == [engine.requests[0].request_id]
