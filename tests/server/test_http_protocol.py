"""Raw bytes at a real uvicorn server: what is no HTTP, endless heads, pipelines."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine_client import FakeClient
from fake_server import Running, running, until

from tokenspeed.server import http_protocol
from tokenspeed.server.http_protocol import MAX_HEAD_BYTES

GET = b"GET /liveness HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"a" * 8192


async def exchange(server: Running, pieces: list[bytes]) -> bytes:
    """Send the pieces one by one, in reads of their own, until the server closes; what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    reading = asyncio.create_task(reader.read())
    try:
        for piece in pieces:
            if reading.done():
                break
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        return await asyncio.wait_for(reading, 20)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [GET, b"X: ", *[PIECE] * 40],
        [GET, *[b"X: " + PIECE + b"\r\n"] * 40],
        [b"GET /", *[PIECE] * 40],
        [CHUNKED, b"2\r\n{}\r\n0\r\nX: ", *[PIECE] * 40],
        [CHUNKED, b"2;", *[PIECE] * 40],
    ],
    ids=["header", "headers", "url", "trailer", "extension"],
)
async def test_a_head_without_end_is_refused(engine: FakeClient, pieces: list[bytes]):
    """httptools sets no limit: 80 MB in one header stopped the event loop for 9 s, before any key was asked for."""
    async with running(engine) as server:
        answer = await exchange(server, pieces)
        *_, last = answer.split(b"HTTP/1.1 ")
        assert last[:3] in (b"431", b"400"), answer[:300]  # 400 where the parser has a limit of its own
        assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_long_bodies_and_usual_heads_pass(engine: FakeClient):
    body = json.dumps({"prompt": "a" * 3 * MAX_HEAD_BYTES}).encode()
    half = len(body) // 2
    pieces = [CHUNKED, *[b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:])], b"0\r\n\r\n"]
    whole = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    head = [GET, *[b"X: " + b"b" * 1000 + b"\r\n"] * 20, b"\r\n"]
    last = [GET + b"Connection: close\r\n\r\n"]
    async with running(engine) as server:
        answer = await exchange(server, [*pieces, whole, body[:half], body[half:], *head, *head, *last])
        assert answer.count(b"HTTP/1.1 200 OK") == 5 and answer.count(b"HTTP/1.1") == 5


async def test_a_head_that_never_ends_is_not_awaited_for_ever(engine: FakeClient, monkeypatch):
    """The bug: uvicorn waits without a limit for the rest of a head, or for a first byte."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    async with running(engine) as server:
        assert await exchange(server, []) == b""
        for pieces in ([GET], [b"\r\n"], [CHUNKED, b"2\r\n{}\r\n", b"0\r\nX"]):
            answer = await exchange(server, pieces)
            assert b" 408 Request Timeout\r\n" in answer or answer.startswith(b"HTTP/1.1 4"), answer
        answer = await exchange(server, [GET + b"\r\n", GET, b"Connection: close\r\n\r\n"])
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        engine.delay_s = 0.02  # an answer may take longer than a head
        body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        answer = await exchange(server, [post, GET])
        assert answer.count(b"HTTP/1.1 200 OK") == 1 and answer.count(b"HTTP/1.1 408") == 1


def posting(num_bytes: int) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % num_bytes


async def test_a_body_that_trickles_is_not_awaited_for_ever(engine: FakeClient, monkeypatch):
    """The bug: whoever had sent a head kept the connection, and a task, with a byte now and then."""
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http_protocol, "BODY_BYTES_PER_S", 1e9)
    async with running(engine) as server:
        for pieces in (
            [posting(9)],
            [posting(1 << 20), *[b" "] * 400],
            [CHUNKED, *[b"1\r\n \r\n"] * 400],
            [GET + b"\r\n", posting(9), b"{"],
        ):
            answer = await exchange(server, pieces)
            assert answer.count(b"HTTP/1.1 408 Request Timeout\r\n") == 1, answer
            assert b"body took longer than 0.05 s" in answer and b"connection: close" in answer


async def test_a_body_that_keeps_coming_may_take_longer(engine: FakeClient, monkeypatch):
    """What has come buys time; then the answer is as ever."""
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.02)
    monkeypatch.setattr(http_protocol, "BODY_BYTES_PER_S", 8)
    body = json.dumps({"prompt": "a" * 100}).encode()
    pieces = [body[place : place + 8] for place in range(0, len(body), 8)]
    async with running(engine) as server:
        answer = await exchange(server, [posting(len(body)), *pieces, GET + b"Connection: close\r\n\r\n"])
        assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_a_body_behind_a_request_that_is_being_answered_waits(engine: FakeClient, monkeypatch):
    """A pipelined request's body is not late while the server itself does not read it, and no 408 cuts an answer."""
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.02)
    engine.delay_s = 0.05
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with running(engine) as server:
        answer = await exchange(server, [first + posting(9)])
        whole, _, late = answer.partition(b"HTTP/1.1 408")
        assert whole.startswith(b"HTTP/1.1 200 OK") and whole.endswith(b"}") and late


async def test_what_is_no_http_gets_an_error_of_the_usual_shape(engine: FakeClient):
    async with running(engine) as server:
        answer = await exchange(server, [b"\x16\x03\x01\x02\x00\x01\x00"])
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def http10(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST %s HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(content)) + content


async def test_http_1_0_gets_no_chunks(engine: FakeClient):
    """Streams came in chunks, which HTTP/1.0 does not know: their lengths stood in the middle of the text."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True}
    async with running(engine) as server:
        answer = await exchange(server, [http10("/v1/completions", body)])
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"chunked" not in head.lower() and b"connection: close" in head
        assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in rest.split(b"\n") if line)
        answer = await exchange(server, [http10("/tokenize", {"prompt": "ab"})])
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(rest) in head and json.loads(rest)["count"] == 3


async def test_monitors_may_ask_with_head(engine: FakeClient):
    """HEAD /health was 405."""
    async with running(engine, api_keys=("secret",)) as server:
        for path in (b"/health", b"/liveness", b"/readiness", b"/version", b"/metrics"):
            answer = await exchange(server, [b"HEAD %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path])
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"content-length" in head and not rest
        answer = await exchange(server, [b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 405"))


async def test_all_of_a_pipeline_learn_that_the_client_has_gone(engine: FakeClient, caplog: pytest.LogCaptureFixture):
    """Only the last request was told: the one before it was generated to its end, and written to a closed socket."""
    engine.reply, engine.gate = "x" * 200, asyncio.Event()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    async with running(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(one % (len(body), body) * 2)
        await until(lambda: bool(engine.running))
        writer.transport.abort()
        await until(lambda: not engine.running)
        assert len(engine.closed_early) == 1
        engine.gate.set()
        await asyncio.sleep(0.05)
    assert "closed" not in caplog.text and "Exception" not in caplog.text


async def test_what_is_no_http_does_not_come_out_inside_an_answer(engine: FakeClient):
    """Bytes that are no HTTP behind a request that is being answered: a second status line stood in its stream."""
    engine.reply, engine.gate = "x" * 50, asyncio.Event()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 50, "stream": True}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    async with running(engine) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(one % (len(body), body))
        answer = await reader.readuntil(b"data: ")
        writer.write(b"\x00\x01 nonsense\r\n\r\n")
        answer += await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 200")
        await until(lambda: not engine.running)
