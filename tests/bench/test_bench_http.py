"""The HTTP client and the load runner against a scripted server: chunks, errors, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

from tokenspeed.bench.http_client import RequestResult, Timeouts, find_model, open_session, stream_request
from tokenspeed.bench.load import run_load
from tokenspeed.bench.sessions import Conversation, Session, Turn

Script = Callable[[web.StreamResponse], AsyncIterator[None]]


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, **more) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None, **more}])


FINISH = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
USAGE = event(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
)
DONE = b"data: [DONE]\n\n"


class Server:
    """Answers every POST with `blocks`, sent one after the other; counts what is in flight."""

    def __init__(self) -> None:
        self.url = ""
        self.blocks: list[bytes] = []
        self.status = 200
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.models: list[dict] | None = [{"id": "m"}]
        self.in_flight = self.peak = 0

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.Response(status=self.status, text="no such thing")
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for block in self.blocks:
                await response.write(block)
                await asyncio.sleep(0.005)
            return response
        finally:
            self.in_flight -= 1

    async def get(self, request: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=503, text="loading")
        return web.json_response({"data": self.models})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    script = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", script.post)
    app.router.add_get("/v1/models", script.get)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = site.name
    yield script
    await runner.cleanup()


async def ask(server: Server, **body) -> RequestResult:
    async with open_session(timeouts=Timeouts(request_s=5.0)) as http:
        return await stream_request(http, f"{server.url}/v1/completions", body)


async def test_a_whole_answer(server):
    server.blocks = [text("a"), text("b"), text("c"), FINISH, USAGE, DONE]
    result = await ask(server, prompt="x")
    assert (result.error, result.text) == (None, "abc")
    assert (result.prompt_len, result.output_len, result.cached_len) == (9, 5, 4)
    assert len(result.token_times) == 3
    assert result.started_s < result.token_times[0] <= result.token_times[-1] <= result.ended_s
    assert server.bodies == [{"prompt": "x"}]


async def test_events_may_be_cut_anywhere_and_come_together(server):
    stream = b"".join([text("é"), text("b"), FINISH, USAGE, DONE]).replace(b"\n\n", b"\r\n\r\n")
    for size in (1, 7, 50, len(stream)):
        server.blocks = [stream[start : start + size] for start in range(0, len(stream), size)] if size > 1 else [
            stream[:40], stream[40:41], stream[41:]
        ]  # fmt: skip
        result = await ask(server)
        assert (result.error, result.text, result.output_len) == (None, "éb", 5)


async def test_a_role_and_an_end_are_no_tokens_but_reasoning_and_ids_are(server):
    def delta(**fields) -> bytes:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])

    server.blocks = [delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), FINISH]
    result = await ask(server)
    assert (result.text, len(result.token_times), result.output_len) == ("a", 2, 2)
    server.blocks = [text("", token_ids=[]), text("", token_ids=[5]), text("", token_ids=[6, 7]), FINISH, USAGE]
    result = await ask(server)
    assert (result.token_ids, len(result.token_times)) == ([5, 6, 7], 2)


async def test_a_line_longer_than_usual_buffers(server):
    server.blocks = [text("", prompt_token_ids=[31999] * 200_000), text("a"), FINISH, USAGE]
    assert (await ask(server)).error is None


async def test_what_a_server_may_do_wrong_is_an_error_of_the_request(server):
    server.blocks = [text("a"), event(error={"message": "out of luck"})]
    assert "out of luck" in ((await ask(server)).error or "")
    server.blocks = [text("a"), USAGE, DONE]
    assert (await ask(server)).error == "the stream ended without a finish_reason"
    server.blocks = [b'data: {"choices": 5}\n\n']
    assert "ValidationError" in ((await ask(server)).error or "")
    server.status = 429
    assert (await ask(server)).error == "HTTP 429: no such thing"
    server.url = "http://127.0.0.1:9"  # the discard port: nobody listens
    assert "ClientConnectorError" in ((await ask(server)).error or "")


async def test_a_slow_answer_times_out(server):
    server.blocks = [text("a")] * 1000
    async with open_session(timeouts=Timeouts(request_s=0.05)) as http:
        result = await stream_request(http, f"{server.url}/v1/completions", {})
    assert result.error == "timed out"


async def test_the_model_is_found_once_the_server_answers(server):
    async with open_session() as http:
        assert await find_model(http, server.url, 5.0) == "m"
        server.models = None
        said: list[str] = []
        waiting = asyncio.create_task(find_model(http, server.url, 5.0, poll_s=0.01, on_wait=said.append))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        server.models = [{"id": "late"}]
        assert await waiting == "late"
        assert said == ["HTTP 503: loading"], "once, however long it takes"
        server.models = None
        with pytest.raises(TimeoutError, match=r"does not answer within 0 s \(last: HTTP 503: loading\)"):
            await find_model(http, server.url, 0.0)


async def load(server: Server, sessions: list[Session], max_concurrency: int | None) -> list[RequestResult]:
    seen: list[RequestResult] = []
    async with open_session() as http:

        async def send(number: int, conversation: Conversation) -> RequestResult:
            body = {"prompt": conversation.prompt(), "number": number}
            return await stream_request(http, f"{server.url}/v1/completions", body)

        arrivals = [0.0] * len(sessions)
        results = await run_load(sessions, arrivals, send, lambda result: result.text, max_concurrency, seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, results))
    return results


async def test_no_more_than_the_limit_run_together(server):
    server.blocks = [text("a"), text("b"), FINISH, USAGE]
    sessions = [Session((Turn(f"p{n}", 2),)) for n in range(9)]
    results = await load(server, sessions, 3)
    assert server.peak == 3
    assert len(results) == 9 and all(result.error is None for result in results)
    await load(server, sessions, None)
    assert server.peak == 9


async def test_turns_follow_each_other_with_the_answer_between(server):
    server.blocks = [text("A"), FINISH, USAGE]
    sessions = [Session((Turn("x", 1), Turn("y", 1), Turn("z", 1)), opening="s")] * 2
    results = await load(server, sessions, None)
    assert len(results) == 6
    assert sorted(body["prompt"] for body in server.bodies) == ["sx", "sx", "sxAy", "sxAy", "sxAyAz", "sxAyAz"]
    assert sorted(body["number"] for body in server.bodies) == list(range(6))


async def test_a_failed_turn_ends_its_session(server):
    server.status = 500
    results = await load(server, [Session((Turn("x", 1), Turn("y", 1)))], None)
    assert [result.error for result in results] == ["HTTP 500: no such thing"]


async def test_headers_and_certificates():
    async with open_session({"Authorization": "Bearer k"}, insecure=True) as http:
        assert http.headers["Authorization"] == "Bearer k"
        assert isinstance(http.connector, aiohttp.TCPConnector)
