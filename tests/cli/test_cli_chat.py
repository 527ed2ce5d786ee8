"""The terminal chat against a scripted server (httpx's mock transport): what is sent, shown and remembered."""

from __future__ import annotations

import json

import httpx
import pytest

from tokenspeed.cli.chat import converse, first_model, stream_chat
from tokenspeed.cli.main import main
from tokenspeed.protocol.errors import TokenSpeedError


def sse(*events) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def piece(text):
    return {"choices": [{"delta": {"content": text}}]}


def client(handler) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handler))


def test_pieces_are_streamed_in_order():
    stream = sse({"choices": [{"delta": {"role": "assistant"}}]}, piece("Hel"), piece("lo"), {"choices": []}, b"[DONE]")
    with client(lambda request: httpx.Response(200, content=stream)) as http:
        assert list(stream_chat(http, {"messages": []})) == ["Hel", "lo"]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "HTTP 400: too long"),
        (httpx.Response(502, text="bad gateway"), "HTTP 502: bad gateway"),
        (httpx.Response(200, content=sse(piece("a"), {"error": {"message": "engine died"}}, b"[DONE]")), "engine died"),
    ],
)
def test_refusals_are_in_the_servers_words(response, words):
    with client(lambda request: response) as http, pytest.raises(TokenSpeedError, match=words):
        list(stream_chat(http, {"messages": []}))


def test_history_grows_and_forgets_a_failed_question():
    seen: list[list[dict[str, str]]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        messages = json.loads(request.content)["messages"]
        seen.append(messages)
        if messages[-1]["content"] == "bad":
            return httpx.Response(400, json={"error": {"message": "no"}})
        return httpx.Response(200, content=sse(piece("re: " + messages[-1]["content"]), b"[DONE]"))

    questions = iter(["one", "bad", "two", None])
    shown: list[str] = []
    system = [{"role": "system", "content": "s"}]
    with client(handler) as http:
        converse(http, {"model": "m"}, system, lambda: next(questions), shown.append)
    assert shown == ["re: one", "\n", "\n[HTTP 400: no]\n", "re: two", "\n"]
    assert [[message["content"] for message in messages] for messages in seen] == [
        ["s", "one"],
        ["s", "one", "re: one", "bad"],
        ["s", "one", "re: one", "two"],
    ]


def test_model_is_asked_from_the_server():
    with client(lambda request: httpx.Response(200, json={"data": [{"id": "m"}]})) as http:
        assert first_model(http) == "m"


def test_no_server_is_a_users_error(capsys):
    # Port 9 (discard) is closed on ordinary machines, and nothing answers HTTP there.
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "tokenspeed serve" in capsys.readouterr().err


def test_bad_arguments_are_a_users_error(capsys):
    assert main(["chat", "--max-tokens", "x"]) == 2
    assert "--max-tokens" in capsys.readouterr().err
