"""Fixtures of the server room: a fake engine, and an HTTP client of an application over it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from app_client import http_client
from fake_engine_client import FakeClient


@pytest.fixture
def engine() -> FakeClient:
    return FakeClient()


@pytest_asyncio.fixture
async def http(engine: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(engine) as client:
        yield client
