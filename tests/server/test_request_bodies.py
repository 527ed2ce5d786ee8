"""Bodies as bytes: what is not JSON, what is nearly JSON, and random JSON. Never a 500."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import msgspec
import pytest
from app_client import chat, http_client
from fake_engine_client import FakeClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body import MAX_DEPTH, parse_object, to_struct
from tokenspeed.server.openai.chat import ChatRequest
from tokenspeed.server.openai.completions import CompletionRequest

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "line 1"),
        (b"[]", "array"),
        (b"null", "null"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 1}}', "twice"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"\\udc00": 1, "\\udc00": 2}', "twice"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "deeper"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper"),
        (b'{"a": ' + b"[" * 100_000, "deeper"),
    ],
)
def test_not_one_clean_object(body: bytes, words: str):
    with pytest.raises(InvalidRequest, match=words):
        parse_object(body)


def test_clean_objects():
    assert parse_object(b' {"a": "\\ud83d\\ude00", "b": [[1]], "c": 1e3} ') == {"a": "😀", "b": [[1]], "c": 1000.0}
    wide = json.dumps({"a": [[1]] * 1000}).encode()
    assert len(parse_object(wide)["a"]) == 1000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_bad_bodies_over_http(http: httpx.AsyncClient, path: str):
    # The last one once gave 500: the answer named the key, and half a character cannot be sent back.
    for body in (b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"\\ud800": 1, "\\ud800": 2}'):
        response = await http.post(path, content=body, headers=JSON)
        assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_content_types(http: httpx.AsyncClient):
    body = json.dumps(chat()).encode()
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400), ("multipart/form-data", 400)):
        response = await http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert response.status_code == status
    response = await http.post("/v1/chat/completions", content=body)  # none at all
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 2000}),
        ("/v1/chat/completions", {**chat(), "chat_template_kwargs": {"x": ["a"] * 2000}}),
        ("/v1/completions", {"prompt": ["word " * 40] * 200}),
        ("/tokenize", {"prompt": "a" * 30_000}),
        ("/detokenize", {"tokens": [97] * 30_000}),
    ],
)
async def test_much_work_leaves_the_event_loop(engine: FakeClient, path: str, body: dict[str, Any]):
    """Many small things are a large one: 300,000 empty messages stopped every stream for 19 s."""
    threads: list[int] = []

    def noted(work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*args, **kwargs)

        return run

    for owner, name in ((engine, "render_chat"), (engine.tokenizer, "encode"), (engine.tokenizer, "decode")):
        setattr(owner, name, noted(getattr(owner, name)))
    async with http_client(engine) as http:
        assert (await http.post(path, json=body)).status_code < 500
    assert threads[0] != threading.get_ident()  # later calls are the fake engine's own


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_a_request_id_becomes_a_header_so_it_holds_no_newline(http: httpx.AsyncClient, name: str):
    """`$` matches before a last newline too: the connection broke without an answer, or the header split the reply."""
    for wanted, status in (("a.b:c-d_1", 200), ("a\n", 400), ("\na", 400), ("a\nb", 400), ("", 400), ("a" * 129, 400)):
        response = await http.post("/v1/chat/completions", json=chat(**{name: wanted}))
        assert response.status_code == status, wanted


FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - {"cache_salt"})
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["tiny", "text", "user"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"role": st.sampled_from(["user", "assistant", "tool", "x"]) | VALUES, "content": VALUES, "name": VALUES},
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=4),
    messages=st.lists(MESSAGE, max_size=2) | VALUES,
    prompt=VALUES,
)
async def test_random_json_never_gives_a_500(fields: dict[str, Any], messages: Any, prompt: Any):
    engine = FakeClient("ok")
    async with http_client(engine) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": messages, **fields}),
            ("/v1/completions", {"prompt": prompt, **fields}),
            ("/tokenize", {"prompt": prompt, **fields}),
            ("/detokenize", {"tokens": prompt}),
        ):
            content = json.dumps(body).encode()
            response = await http.post(path, content=content, headers=JSON)
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"]
    assert not engine.running


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_an_object_or_refused(body: bytes):
    try:
        assert isinstance(parse_object(body), dict)
    except InvalidRequest:
        pass


class WithMetadata(msgspec.Struct):
    metadata: dict[str, str] = {}


def test_a_wrong_value_in_a_dict_is_said_without_a_made_up_index() -> None:
    """Regression: "metadata[...] is an object; expected str, got int"."""
    with pytest.raises(InvalidRequest) as raised:
        to_struct({"metadata": {"a": 1}}, WithMetadata)
    assert raised.value.param == "metadata"
    assert str(raised.value) == "metadata: one of its values is wrong; expected str, got int"


HUGE = "x" * 200_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", chat(tool_choice=HUGE)),
        ("/v1/chat/completions", chat(tool_choice={"type": "function", "function": {"name": HUGE}})),
        ("/v1/chat/completions", chat(tool_choice={"type": HUGE})),
        ("/v1/chat/completions", chat(reasoning_effort=HUGE)),
        ("/v1/chat/completions", chat(response_format={"type": HUGE})),
        ("/v1/chat/completions", chat(messages=[{"role": HUGE, "content": "a"}])),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": [{"type": HUGE}]}])),
        ("/v1/chat/completions", chat(tools=[{"type": "function", "function": {"name": HUGE}}] * 2)),
        ("/v1/chat/completions", chat(model=HUGE)),
        ("/v1/chat/completions", chat(request_id=HUGE)),
        ("/v1/chat/completions", chat(stream_options=HUGE)),
        ("/v1/chat/completions", chat(structured_outputs={HUGE: 1})),
        ("/v1/chat/completions", chat(structured_outputs={"structural_tag": {"format": {"type": HUGE}}})),
        ("/v1/chat/completions", chat(structured_outputs={"json": {"type": HUGE}})),
        ("/v1/chat/completions", chat(structured_outputs={"json": {HUGE: 1, "not": {}}})),
        ("/v1/chat/completions", chat(structured_outputs={"regex": HUGE + "("})),
        ("/v1/chat/completions", chat(**{HUGE: 1})),
        ("/v1/chat/completions", chat(logit_bias={HUGE: 1})),
        ("/v1/chat/completions", chat(chat_template_kwargs={"documents": HUGE})),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "echo": HUGE}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": HUGE, "content": "a"}]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [], "tool_choice": {"type": HUGE}}),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": HUGE}]}]},
        ),
        ("/v1/responses", {"model": "tiny", "input": [{"type": HUGE}]}),
        ("/v1/responses", {"model": "tiny", "input": "a", "tools": [{"type": HUGE}]}),
        ("/v1/responses", {"model": "tiny", "input": "a", "tool_choice": {"type": HUGE}}),
        ("/v1/responses", {"model": "tiny", "input": "a", "previous_response_id": HUGE}),
        ("/v1/responses", {"model": "tiny", "input": "a", "text": {"format": {"type": HUGE}}}),
        ("/parse/function_call", {"text": "a", "tool_call_parser": HUGE}),
        ("/tokenize", {"model": "tiny", "messages": [{"role": HUGE}]}),
        ("/" + "x" * 3000, {}),
    ],
)
async def test_an_error_shows_no_more_than_a_line_of_a_value(path: str, fields: dict[str, Any]):
    """An enum's error repeated the value: 10 MB of it came back."""
    async with http_client(FakeClient()) as http:
        response = await http.post(path, json=fields)
    assert response.status_code in (400, 404)
    assert len(response.content) < 3000 and "x" * 400 not in response.text


def test_a_long_message_keeps_its_beginning_and_its_remedy():
    error = InvalidRequest("seed is " + "9" * 100_000 + "; send less", param="p" * 1000)
    assert error.message.startswith("seed is 99") and error.message.endswith("99; send less")
    assert len(error.message) <= 2000 and error.param is not None and len(error.param) <= 200
