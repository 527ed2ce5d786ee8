"""How much a body holds is told before it is parsed, whatever stands in its strings."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from app_client import http_client
from fake_engine_client import FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server import body_size
from tokenspeed.server.body import parse_object
from tokenspeed.server.body_size import MAX_ITEMS, MAX_PARTS, check_size

TEXT = st.text(st.sampled_from('\\",[]{}:a\n'), max_size=12)
JSON = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=25,
)


def parts_of(value: Any) -> tuple[int, int]:
    """(objects, arrays and members; commas between items) of a parsed value, counted by walking it."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [parts_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    members = len(value) if isinstance(value, dict) else 0
    return 1 + members + sum(one for one, _ in inner), max(0, len(value) - 1) + sum(two for _, two in inner)


@settings(max_examples=300, deadline=None)
@given(value=JSON, chunk=st.integers(1, 9))
def test_marks_are_counted_outside_of_strings_only(value: Any, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_size, "_CHUNK_BYTES", chunk)
        assert body_size._outside_strings(json.dumps(value).encode()) == parts_of(value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"metadata": {"a": [' + b",".join([b"[]"] * MAX_PARTS) + b"]}}", f"limit is {MAX_PARTS}"),
        (b'{"a": {' + b",".join(b'"%d": 1' % n for n in range(MAX_PARTS)) + b"}}", f"limit is {MAX_PARTS}"),
        (b'{"prompt": [' + b",".join([b"1"] * (MAX_ITEMS + 2)) + b"]}", f"limit is {MAX_ITEMS}"),
    ],
    ids=["containers", "members", "items"],
)
def test_bodies_of_too_many_parts_are_not_parsed(body: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 MB of small arrays stopped the whole server for nine seconds: the parser lets no other thread run."""
    monkeypatch.setattr(json, "loads", lambda *_args, **_kwargs: pytest.fail("parsed"))
    with pytest.raises(InvalidRequest, match=words):
        parse_object(body)


def test_what_honest_clients_send_passes() -> None:
    ids = [list(range(1000))] * 1024
    assert parse_object(json.dumps({"prompt": ids}).encode())["prompt"] == ids
    code = json.dumps({"prompt": '{"a": [1, 2, "\\"]}\n' * 100_000}).encode()
    assert len(parse_object(code)) == 1


async def test_the_client_is_told() -> None:
    async with http_client(FakeClient()) as http:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
            body = b'{"metadata": {"a": [' + b",".join([b"[]"] * MAX_PARTS) + b"]}}"
            response = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert f"the limit is {MAX_PARTS}" in response.json()["error"]["message"]


def test_the_collector_rests_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    loads = json.loads

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return loads(*args, **kwargs)

    monkeypatch.setattr(json, "loads", spy)
    assert gc.isenabled()
    parse_object(b'{"a": 1}')
    with pytest.raises(InvalidRequest):
        parse_object(b'{"a": NaN}')
    assert seen == [False, False] and gc.isenabled()
    start = threading.Barrier(4)

    def parse(_: int) -> None:
        start.wait()
        for _round in range(50):
            parse_object(b'{"a": [1, 2, 3]}')

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(parse, range(4)))
    assert gc.isenabled()


def test_a_small_body_is_not_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_size, "_outside_strings", lambda _body: pytest.fail("counted"))
    check_size(json.dumps({"messages": [{"role": "user", "content": "[{,:" * 1000}] * 30}).encode())
