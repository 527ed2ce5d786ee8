"""A real uvicorn server over the fake engine (or another), on the test's loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_engine_client import FakeClient

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import EngineClient
from tokenspeed.server.app import build_app
from tokenspeed.server.lifecycle import StopSignal, bind, serve


class Running:
    """A server that runs on the test's loop."""

    def __init__(self, url: str, stop: StopSignal, task: asyncio.Task[int]) -> None:
        self.url, self.stop, self.task = url, stop, task


@asynccontextmanager
async def running(engine: EngineClient, **settings: Any) -> AsyncIterator[Running]:
    config = ServerConfig(**{"served_model_names": ("tiny",), "port": 0, "drain_timeout_s": 5.0, **settings})
    sock = bind(config.host, config.port)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stop = StopSignal()
    task = asyncio.create_task(serve(engine, build_app(engine, config), config, sock, stop))
    async with httpx.AsyncClient() as probe:
        while True:
            try:
                assert (await probe.get(f"{url}/readiness")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
    try:
        yield Running(url, stop, task)
    finally:
        if isinstance(engine, FakeClient) and engine.gate is not None:
            engine.gate.set()
        stop.trigger(signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 20)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition never came true")
