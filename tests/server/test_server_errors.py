"""Statuses, error shapes, keys, limits, probes and operators' routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from app_client import chat, events, http_client
from fake_engine_client import FakeClient

import tokenspeed
from tokenspeed.protocol.errors import EngineDead, Overloaded
from tokenspeed.protocol.grammar import INVALID_GRAMMAR

URL = "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


async def test_unknown_routes_methods_and_models(http: httpx.AsyncClient):
    response = await http.get("/nope")
    assert response.status_code == 404 and error_of(response)["code"] == "not_found"
    response = await http.get(URL)
    assert response.status_code == 405 and "POST" in error_of(response)["message"]
    for path, body in ((URL, chat(model="gpt-9")), ("/v1/completions", {"model": "gpt-9", "prompt": "a"})):
        response = await http.post(path, json=body)
        assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"
        assert "'tiny'" in error_of(response)["message"]
    assert (await http.get("/v1/models/gpt-9")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (Overloaded("the queue is full", 3), 429, "3"),
        (Overloaded("draining", 0, draining=True), 503, "1"),
        (EngineDead("gone"), 503, None),
        (RuntimeError("a bug"), 500, None),
    ],
)
async def test_refusals_have_their_status_in_streams_too(
    http: httpx.AsyncClient, engine: FakeClient, stream: bool, refusal: Exception, status: int, retry_after: str | None
):
    engine.refuse = refusal
    response = await http.post(URL, json=chat(stream=stream))
    assert response.status_code == status and response.headers.get("retry-after") == retry_after
    assert "a bug" not in error_of(response)["message"]
    engine.refuse = None
    assert (await http.post(URL, json=chat())).status_code == 200


async def test_a_tokenizer_failure_fails_alone(http: httpx.AsyncClient):
    bad, good = await asyncio.gather(
        http.post(URL, json=chat(messages=[{"role": "user", "content": "crash in template"}])),
        http.post(URL, json=chat()),
    )
    assert bad.status_code == 500 and error_of(bad)["code"] == "internal_error"
    assert good.status_code == 200


@pytest.mark.parametrize("knob", ["fail_after", "vanish_after", "boom_after"])
async def test_failure_in_the_middle(http: httpx.AsyncClient, engine: FakeClient, knob: str):
    setattr(engine, knob, 2)
    response = await http.post(URL, json=chat())
    assert response.status_code == 500 and error_of(response)["type"] == "server_error"
    response = await http.post(URL, json=chat(stream=True, n=2))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert last["error"]["type"] == "server_error" and all("choices" in chunk for chunk in chunks)
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    if knob == "fail_after":
        assert "NaN logits" in last["error"]["message"]
    assert not engine.running


async def test_dead_and_draining_engines(http: httpx.AsyncClient, engine: FakeClient):
    for path in ("/liveness", "/readiness", "/health", "/health_generate"):
        assert (await http.get(path)).status_code == 200
    engine.is_draining = True
    assert (await http.get("/health")).status_code == 200
    response = await http.get("/readiness")
    assert response.status_code == 503 and "retry-after" in response.headers
    assert (await http.post(URL, json=chat())).status_code == 503
    engine.is_draining, engine.is_alive = False, False
    for path in ("/readiness", "/health", "/health_generate"):
        response = await http.get(path)
        assert response.status_code == 503 and error_of(response)["code"] == "engine_dead"
    assert (await http.get("/liveness")).status_code == 200
    assert (await http.post(URL, json=chat())).status_code == 503
    assert (await http.post("/flush_cache")).status_code == 503


async def test_health_generate_takes_a_busy_engine_for_a_healthy_one(http: httpx.AsyncClient, engine: FakeClient):
    engine.refuse = Overloaded("full", 1)
    assert (await http.get("/health_generate")).status_code == 200
    engine.refuse, engine.fail_after, engine.reply = None, 0, "xx"
    assert (await http.get("/health_generate")).status_code == 200  # one token, so it ends before it can fail
    engine.boom_after = 0
    assert (await http.get("/health_generate")).status_code == 500
    assert engine.requests[-1].sampling.max_tokens == 1


async def test_keys(engine: FakeClient):
    async with http_client(engine, api_keys=("secret", "other"), cors_allow_origins=("*",)) as http:
        for path in ("/health", "/liveness", "/readiness", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/v1/models", "/openapi.json", "/health_generate", "/get_server_info", "/nope"):
            response = await http.get(path)
            assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key", path
        for header in ("Bearer wrong", "secret", "Basic secret", "Bearer ", "Bearer sécret", "Bearer secretx"):
            response = await http.get("/v1/models", headers={"authorization": header.encode()})
            assert response.status_code == 401
        for header in ("Bearer secret", "bearer other"):
            assert (await http.get("/v1/models", headers={"authorization": header})).status_code == 200
        info = await http.get("/get_server_info", headers={"authorization": "Bearer secret"})
        assert "secret" not in info.text
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        assert (await http.options(URL, headers=preflight)).status_code == 200
        response = await http.get("/v1/models", headers={"origin": "http://a"})
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "*"


async def test_no_cors_headers_unless_asked(http: httpx.AsyncClient):
    response = await http.get("/v1/models", headers={"origin": "http://a"})
    assert "access-control-allow-origin" not in response.headers


async def test_size_limit(engine: FakeClient):
    body = json.dumps(chat(user="u" * 2000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with http_client(engine, max_request_bytes=1000) as http:
        response = await http.post(URL, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 413 and "limit is 1000" in error_of(response)["message"]
        response = await http.post(URL, content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"
        assert (await http.post(URL, json=chat())).status_code == 200
    async with http_client(engine, max_request_bytes=len(body)) as http:
        response = await http.post(URL, content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 200


async def test_models(http: httpx.AsyncClient):
    listed = (await http.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "tiny-alias"] and listed["object"] == "list"
    card = (await http.get("/v1/models/tiny-alias")).json()
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "tiny", 256)
    assert (await http.post(URL, json=chat(model="tiny-alias"))).json()["model"] == "tiny"
    no_model = chat()
    del no_model["model"]
    assert (await http.post(URL, json=no_model)).status_code == 200


async def test_model_names_with_slashes(engine: FakeClient):
    async with http_client(engine, served_model_names=("org/name",)) as http:
        assert (await http.get("/v1/models/org/name")).json()["id"] == "org/name"


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(http: httpx.AsyncClient, prefix: str):
    answer = (await http.post(f"{prefix}/tokenize", json={"prompt": "é", "return_token_strs": True})).json()
    assert answer == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [256, 0xC3, 0xA9],
        "token_strs": ["<bos>", "\ufffd", "\ufffd"],
    }
    answer = (await http.post(f"{prefix}/tokenize", json={"prompt": "é", "add_special_tokens": False})).json()
    assert answer["tokens"] == [0xC3, 0xA9] and answer["token_strs"] is None
    assert (await http.post(f"{prefix}/detokenize", json={"tokens": [256, 0xC3, 0xA9]})).json() == {"prompt": "<bos>é"}
    messages = [{"role": "user", "content": "hi"}]
    answer = (await http.post(f"{prefix}/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert answer["count"] == 9


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": ""}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
async def test_tokenize_refusals(http: httpx.AsyncClient, path: str, body: Any, param: str):
    response = await http.post(path, json=body)
    assert response.status_code == 400 and error_of(response)["param"] == param


async def test_flush_cache(http: httpx.AsyncClient, engine: FakeClient):
    for method in ("GET", "POST"):
        response = await http.request(method, "/flush_cache")
        assert response.status_code == 200 and response.json()["success"] is True
    engine.command_result = (False, "2 requests run")
    response = await http.post("/flush_cache")
    assert (response.status_code, response.json()) == (400, {"success": False, "message": "2 requests run"})
    assert engine.commands == ["flush_cache"] * 3


async def test_check(http: httpx.AsyncClient, engine: FakeClient):
    assert (await http.post("/debug/check")).json()["success"] is True
    engine.command_result = (False, "page 3 is held twice")
    response = await http.post("/debug/check")
    assert (response.status_code, response.json()["message"]) == (500, "page 3 is held twice")


async def test_version_info_and_schema(http: httpx.AsyncClient):
    assert (await http.get("/version")).json() == {"version": tokenspeed.__version__}
    assert (await http.get("/get_model_info")).json()["architecture"] == "LlamaForCausalLM"
    cache = (await http.get("/get_server_info")).json()["kv_cache"]
    group = {"name": "full", "window": None, "sequence_pages": 4, "kept_tokens": 900}
    assert cache == {"capacity_tokens": 900, "groups": [group]}
    for page in ("/docs", "/redoc"):  # they told browsers to fetch scripts from elsewhere
        assert (await http.get(page)).status_code == 404
    schema = (await http.get("/openapi.json")).json()
    types = schema["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert types[reference.rpartition("/")[2]]["properties"]
    assert "temperature" in types["ChatRequest"]["properties"] and "Message" in types


_SCHEMA = {"type": "object", "properties": {}}
_HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": _HI, "regex": "h.*"}, "invalid_request_error"),
        ("/v1/completions", {"prompt": "hi", "regex": "h.*"}, "invalid_request_error"),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
            "invalid_prompt",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": _HI,
                "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
            },
            "invalid_request_error",
        ),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_the_users_error(
    http: httpx.AsyncClient, engine: FakeClient, path: str, body: dict[str, Any], kind: str
):
    """The bug: a grammar that turned out too slow or too large while it was followed ended in a 500, as if the server
    were at fault, and clients tried again."""
    body, engine.fail_code = {"model": "tiny", **body}, INVALID_GRAMMAR
    for engine.fail_after, streams in ((0, False), (3, False), (0, True)):
        response = await http.post(path, json={**body, "stream": streams})
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    engine.fail_after = 3
    text = (await http.post(path, json={**body, "stream": True})).text
    last = [line for line in text.splitlines() if line.startswith("data: {")][-1]
    error = json.loads(last.removeprefix("data: "))
    error = error.get("response", error)["error"]
    assert error.get("type", error.get("code")) == kind and "NaN" in error["message"]
    assert not engine.running
    engine.fail_code = None
    assert (await http.post(path, json=body)).status_code == 500
