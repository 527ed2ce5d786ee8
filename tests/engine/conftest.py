"""Engines on threads with a fake runner, and clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fake_runner import TEMPLATE, ByteTokenizer, FakeRunner, engine_config

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.launch import EngineThread, wait_ready

Start = Callable[..., Awaitable[AsyncEngineClient]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(config, build)`: a client of an engine on a thread; all are closed in the end."""
    clients: list[AsyncEngineClient] = []

    async def begin(
        config: EngineConfig | None = None,
        build: Callable[[EngineConfig], FakeRunner] = FakeRunner,
        max_queue_len: int | None = None,
        tokenizer: ByteTokenizer | None = None,
    ) -> AsyncEngineClient:
        config = config or engine_config()
        engine = EngineThread(config, build)
        ready = await asyncio.to_thread(wait_ready, engine, 20.0)
        client = AsyncEngineClient(engine, ready, config.model, tokenizer or ByteTokenizer(), TEMPLATE, max_queue_len)
        clients.append(client)
        return client

    yield begin
    for client in clients:
        await client.close()
