"""A real uvicorn server over the fake engine: the official client, disconnects, drain, the engine's death, the port."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable

import httpx
import openai
import pytest
from app_client import chat, events
from fake_engine_client import FakeClient
from fake_server import running, until

from tokenspeed.config.server import ServerConfig
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.server.app import build_app
from tokenspeed.server.lifecycle import EXIT_ENGINE_DEAD, StopSignal, bind, serve

URL = "/v1/chat/completions"


async def test_the_official_client(engine: FakeClient):
    async with (
        running(engine, api_keys=("k",)) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True, top_logprobs=2
        )
        assert [choice.message.content for choice in whole.choices] == ["hello", "hello"]
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
        assert whole.choices[0].logprobs.content[0].top_logprobs[1].token == "i"
        assert whole.usage and whole.usage.prompt_tokens_details
        assert whole.usage.prompt_tokens_details.cached_tokens == 2 and whole._request_id == whole.id
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stop="lo",
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hel"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 3
        text = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=True, max_tokens=2)
        assert [choice.text for choice in text.choices] == ["ahe", "bhe"]
        pieces = await client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=2)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "he"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=[], temperature=1)
        assert bad.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        engine.fail_after = 1
        with pytest.raises(openai.APIError, match="NaN"):
            async for _ in await client.completions.create(model="tiny", prompt="a", stream=True):
                pass


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before_first", [True, False])
async def test_a_disconnect_closes_the_engines_request(engine: FakeClient, stream: bool, before_first: bool):
    engine.reply = "x" * 100
    engine.gate = asyncio.Event()
    if before_first:
        engine.delay_s = 30.0
    async with running(engine) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            asking = asyncio.create_task(http.post(URL, json=chat(stream=stream)))
            await until(lambda: bool(engine.running))
            await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.running)
        assert len(engine.closed_early) == 1
        engine.delay_s = 0.0
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert 'tokenspeed:num_requests_aborted_total{model_name="tiny"} 1.0' in (await http.get("/metrics")).text


async def test_a_disconnect_closes_all_prompts_of_a_request(engine: FakeClient):
    engine.gate = asyncio.Event()
    async with running(engine) as server:
        body = {"prompt": ["a", "b"], "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            await anext(response.aiter_bytes())
            assert len(engine.running) == 2
        await until(lambda: not engine.running)
        assert len(engine.closed_early) == 2


async def test_sigterm_drains(engine: FakeClient):
    engine.gate = asyncio.Event()
    async with running(engine) as server, httpx.AsyncClient(base_url=server.url) as http:
        asking = asyncio.create_task(http.post(URL, json=chat(stream=True)))
        await until(lambda: bool(engine.running))
        server.stop.trigger(signal.SIGTERM)
        await until(lambda: engine.is_draining)
        refused = await http.post(URL, json=chat())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert (await http.get("/readiness")).status_code == 503
        assert (await http.get("/health")).status_code == 200
        engine.gate.set()
        assert events((await asking).text)[-1]["choices"][0]["finish_reason"] == "stop"
        assert await asyncio.wait_for(server.task, 10) == 0


async def test_what_outlives_the_drain_ends_with_an_error_event(engine: FakeClient):
    engine.reply, engine.delay_s = "x" * 200, 0.05
    async with running(engine, drain_timeout_s=0.1) as server, httpx.AsyncClient(base_url=server.url) as http:
        asking = asyncio.create_task(http.post(URL, json=chat(stream=True)))
        whole = asyncio.create_task(http.post(URL, json=chat()))
        await until(lambda: len(engine.running) == 2)
        await asyncio.sleep(0.1)
        server.stop.trigger(signal.SIGINT)
        last = events((await asking).text)[-1]
        assert last["error"]["type"] == "service_unavailable" and "shutting down" in last["error"]["message"]
        assert (await whole).status_code == 503
        assert await asyncio.wait_for(server.task, 10) == 0


async def test_engine_death(engine: FakeClient):
    engine.gate = asyncio.Event()
    async with running(engine) as server, httpx.AsyncClient(base_url=server.url) as http:
        asking = asyncio.create_task(http.post(URL, json=chat(stream=True)))
        await until(lambda: bool(engine.running))
        await asyncio.sleep(0.05)
        engine.is_alive, engine.end_error = False, "the engine died"
        engine.gate.set()
        assert events((await asking).text)[-1]["error"]["type"] == "service_unavailable"
        assert (await http.get("/health")).status_code == 503
        assert await asyncio.wait_for(server.task, 10) == EXIT_ENGINE_DEAD


async def test_a_second_sigint_exits_at_once(monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr("tokenspeed.server.lifecycle.os._exit", codes.append)
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        stop.trigger(number)
        assert stop.is_set and not codes
    stop.trigger(signal.SIGINT)
    assert codes == [130]


def test_a_taken_port_is_a_clean_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="not an address"):
        bind("no-such-host.invalid", 1)


async def test_a_port_taken_after_binding_is_a_clean_error(engine: FakeClient):
    config = ServerConfig(served_model_names=("tiny",), port=0)
    first = bind(config.host, 0)
    second = bind(config.host, first.getsockname()[1])  # Linux allows it while nobody listens
    first.listen()
    with first, pytest.raises(ConfigError, match="cannot listen"):
        await serve(engine, build_app(engine, config), config, second, StopSignal())


async def test_a_chunk_is_sent_when_its_event_comes(engine: FakeClient):
    """Not when the next one does."""
    engine.gate = asyncio.Event()
    arrived: asyncio.Queue[str] = asyncio.Queue()

    async def read(url: str) -> None:
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", URL, json=chat(stream=True)) as response,
        ):
            async for line in response.aiter_lines():
                await arrived.put(line)

    async with running(engine) as server:
        reading: Awaitable[None] = asyncio.create_task(read(server.url))
        lines = [await asyncio.wait_for(arrived.get(), 10) for _ in range(3)]
        assert '"content":"h"' in lines[2] and not engine.gate.is_set()
        engine.gate.set()
        await reading
