"""Texts too long for the model are refused before they are tokenized; long ones keep no thread from the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from app_client import chat, http_client
from fake_engine_client import ByteTokenizer, FakeClient
from starlette.requests import Request

from tokenspeed.server.errors import ClientGone
from tokenspeed.server.text_work import LONG_CHARS, OFF_LOOP_CHARS, TextWork, serving


class CountingTokenizer(ByteTokenizer):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, add_special_tokens, parse_special)


TEXT = "x" * 300  # of bytes, for a model of 256 tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": TEXT}),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", TEXT], "max_tokens": 1}),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": TEXT}])),
        ("/v1/responses", {"model": "tiny", "input": TEXT}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}),
    ],
)
async def test_what_cannot_fit_is_not_tokenized(path: str, body: dict[str, Any]) -> None:
    """30 MB of text were tokenized for a minute, in 4.9 GB, only to be refused."""
    engine = FakeClient()
    engine.tokenizer = tokenizer = CountingTokenizer()
    async with http_client(engine) as http:
        response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert "at least 3" in error["message"] and "256" in error["message"]
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert TEXT not in tokenizer.encoded
    assert not engine.running


async def test_counting_counts_what_does_not_fit() -> None:
    """/tokenize and count_tokens tell how long a text is, which is how clients learn that it is too long."""
    async with http_client(FakeClient()) as http:
        body: dict[str, Any] = {"model": "tiny", "prompt": TEXT}
        assert (await http.post("/tokenize", json=body)).json()["count"] == 301
        body = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
        assert (await http.post("/tokenize", json=body)).json()["count"] > 300
        assert (await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"] > 300


def request_of(connected: asyncio.Event) -> Request:
    """A request whose client is there while `connected` is set."""

    async def receive() -> dict[str, Any]:
        if connected.is_set():
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)  # type: ignore[arg-type]


async def test_a_text_whose_client_has_gone_never_starts() -> None:
    """Abandoned texts went on to be tokenized, and those behind them waited."""
    texts, connected, release = TextWork(), asyncio.Event(), threading.Event()
    ran: list[int] = []

    def work(number: int) -> None:
        ran.append(number)
        release.wait(10)

    async def send(number: int, here: asyncio.Event) -> None:
        serving.set(request_of(here))
        await texts.run(LONG_CHARS + 1, work, number)

    connected.set()
    going = asyncio.Event()
    going.set()
    tasks = [asyncio.create_task(send(number, connected if number < 16 else going)) for number in range(32)]
    while not ran:
        await asyncio.sleep(0.001)
    going.clear()
    release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(ran) == list(range(16))
    assert [type(result) for result in results[16:]] == [ClientGone] * 16


async def test_long_texts_leave_threads_to_the_others() -> None:
    """Six texts of 30 MB held every thread: nobody's prompt was tokenized meanwhile."""
    texts, release = TextWork(), threading.Event()
    long = [asyncio.create_task(texts.run(LONG_CHARS + 1, release.wait, 10)) for _ in range(64)]
    assert await asyncio.wait_for(texts.run(OFF_LOOP_CHARS + 1, lambda: "done"), 5) == "done"
    release.set()
    await asyncio.gather(*long)


async def test_a_short_text_stays_on_the_loop() -> None:
    assert await TextWork().run(OFF_LOOP_CHARS, threading.get_ident) == threading.get_ident()
    assert await TextWork().run(OFF_LOOP_CHARS + 1, threading.get_ident) != threading.get_ident()
