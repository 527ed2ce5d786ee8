"""Responses that are kept: the store's bounds, conversations that go on, and the endpoints that read it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from app_client import http_client
from fake_engine_client import FakeClient
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenspeed.server.responses_api.items import MessageItem, OutputText
from tokenspeed.server.responses_api.response import ReasoningConfig, ResponseObject, TextConfig
from tokenspeed.server.responses_api.store import ResponseStore, StoredResponse

URL = "/v1/responses"


def response(name: str, text: str = "") -> ResponseObject:
    output = (MessageItem(id=f"out-{name}", role="assistant", content=[OutputText(text=text or name)]),)
    return ResponseObject(
        id=name,
        created_at=0,
        status="completed",
        model="tiny",
        output=output,
        parallel_tool_calls=True,
        reasoning=ReasoningConfig(),
        store=True,
        temperature=1.0,
        text=TextConfig(),
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        metadata={},
    )


def put(store: ResponseStore, name: str, previous: StoredResponse | None = None, text: str = "") -> bool:
    return store.put(response(name, text), (MessageItem(id=f"in-{name}", role="user", content=name),), previous)


def ids(stored: StoredResponse | None) -> list[str | None]:
    assert stored is not None
    return [item.id for item in stored.conversation()]


def test_the_least_recently_used_leaves_first():
    store = ResponseStore(max_responses=2)
    assert put(store, "a") and put(store, "b")
    assert store.get("a")
    assert put(store, "c")
    assert store.get("b") is None and store.get("a") and store.get("c") and len(store) == store.num_held == 2


def test_bytes_are_bounded_too():
    store = ResponseStore(max_bytes=4000)
    assert put(store, "a") and store.num_bytes > 400
    one = store.num_bytes
    assert not put(store, "huge", text="x" * 4000) and store.num_bytes == one and store.get("a")
    for number in range(20):
        assert put(store, f"r{number}", text="x" * 500)
        assert store.num_bytes <= 4000
    assert store.get("a") is None and store.get("r19")


def test_what_follows_a_deleted_response_still_knows_it():
    store = ResponseStore()
    put(store, "a")
    put(store, "b", store.get("a"))
    assert store.delete("a") and not store.delete("a") and store.get("a") is None
    assert ids(store.get("b")) == ["in-a", "out-a", "in-b", "out-b"]
    assert store.num_held == 2
    assert store.delete("b") and store.num_held == store.num_bytes == 0


def test_a_response_that_left_while_its_follower_was_made_counts_again():
    store = ResponseStore()
    put(store, "a")
    put(store, "b", store.get("a"))
    previous = store.get("b")
    both = store.num_bytes
    store.delete("a")
    store.delete("b")
    assert store.num_bytes == 0
    put(store, "c", previous)
    assert store.num_held == 3 and store.num_bytes > both
    assert store.delete("c") and store.num_held == store.num_bytes == 0


class StoreMachine(RuleBasedStateMachine):
    """Any order of puts, gets and deletes keeps the bounds, and what is listed keeps its whole conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(max_responses=4, max_bytes=5000)
        self.known: dict[str, list[str]] = {}
        self.held: list[StoredResponse] = []  # as a request holds the previous one while it runs

    @rule(size=st.integers(0, 400), previous=st.integers(0, 5))
    def add(self, size: int, previous: int) -> None:
        name = f"r{len(self.known)}"
        before = self.held[previous % len(self.held)] if self.held and previous else None
        if put(self.store, name, before, "x" * size):
            earlier = self.known[before.response.id] if before is not None else []
            self.known[name] = [*earlier, f"in-{name}", f"out-{name}"]
            found = self.store.get(name)
            assert found is not None
            self.held = [*self.held[-3:], found]

    @rule(number=st.integers(0, 20))
    def delete(self, number: int) -> None:
        self.store.delete(f"r{number}")

    @invariant()
    def is_bounded_and_whole(self) -> None:
        listed = [found for name in self.known if (found := self.store.get(name)) is not None]
        assert len(self.store) == len(listed)
        reachable = {id(turn): turn for found in listed for turn in found.turns()}
        assert self.store.num_held == len(reachable) <= 4
        assert self.store.num_bytes == sum(turn.num_bytes for turn in reachable.values()) <= 5000
        for found in listed:
            assert ids(found) == self.known[found.response.id]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


async def turn(http: httpx.AsyncClient, text: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(URL, json={"input": text, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_conversation_goes_on(http: httpx.AsyncClient, engine: FakeClient):
    first = await turn(http, "one", instructions="be brief")
    second = await turn(http, "two", previous_response_id=first["id"], instructions="be long")
    await turn(http, "three", previous_response_id=second["id"])
    said = [(message["role"], message["content"]) for message in engine.rendered[-1]["messages"]]
    assert said == [("user", "one"), ("assistant", "hello"), ("user", "two"), ("assistant", "hello"), ("user", "three")]
    assert engine.rendered[1]["messages"][0] == {"role": "system", "content": "be long"}
    assert second["previous_response_id"] == first["id"]
    fork = await turn(http, "other", previous_response_id=first["id"])
    assert fork["id"] != second["id"] and len(engine.rendered[-1]["messages"]) == 3


async def test_a_call_is_answered_by_its_output_alone(engine: FakeClient):
    engine.reply = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with http_client(engine, tool_call_parser="qwen") as http:
        first = await turn(http, "hi", tools=[{"type": "function", "name": "f"}])
        (call,) = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        answer = await http.post(URL, json={"input": [output], "previous_response_id": first["id"]})
        assert answer.status_code == 200
    assert [message["role"] for message in engine.rendered[-1]["messages"]] == ["user", "assistant", "tool"]


async def test_get_delete_cancel(http: httpx.AsyncClient):
    made = await turn(http, "hi")
    assert (await http.get(f"{URL}/{made['id']}")).json() == made
    cancelled = await http.post(f"{URL}/{made['id']}/cancel")
    assert cancelled.status_code == 400 and "background" in cancelled.json()["error"]["message"]
    streamed = await http.get(f"{URL}/{made['id']}?stream=true")
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "stream"
    deleted = await http.delete(f"{URL}/{made['id']}")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    for answer in (
        await http.get(f"{URL}/{made['id']}"),
        await http.delete(f"{URL}/{made['id']}"),
        await http.post(f"{URL}/{made['id']}/cancel"),
        await http.get(f"{URL}/{made['id']}/input_items"),
    ):
        assert answer.status_code == 404 and made["id"] in answer.json()["error"]["message"]
    gone = await http.post(URL, json={"input": "hi", "previous_response_id": made["id"]})
    assert gone.status_code == 400 and gone.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("stream", [True, False])
async def test_store_false_keeps_nothing(http: httpx.AsyncClient, engine: FakeClient, stream: bool):
    await http.post(URL, json={"input": "hi", "store": False, "stream": stream})
    await http.post(URL, json={"input": "hi", "stream": stream})
    kept, not_kept = engine.requests[1].request_id, engine.requests[0].request_id
    assert (await http.get(f"{URL}/{kept}")).json()["status"] == "completed"
    assert (await http.get(f"{URL}/{not_kept}")).status_code == 404


async def test_input_items_come_in_pages(http: httpx.AsyncClient):
    parts = [{"type": "input_text", "text": "b"}]
    first = await turn(http, "a")
    second = await turn(http, [{"role": "user", "content": parts}], previous_response_id=first["id"])  # type: ignore[arg-type]
    url = f"{URL}/{second['id']}/input_items"
    page = (await http.get(url, params={"order": "asc"})).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["a", "hello", "b"] and page["has_more"] is False and all(item["id"] for item in page["data"])
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][2]["id"])
    newest = (await http.get(url, params={"limit": 1})).json()
    assert [item["id"] for item in newest["data"]] == [page["last_id"]] and newest["has_more"] is True
    rest = (await http.get(url, params={"after": newest["last_id"]})).json()
    assert [item["id"] for item in rest["data"]] == [page["data"][1]["id"], page["data"][0]["id"]]
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"include": "x"}):
        bad = await http.get(url, params=query)
        assert bad.status_code == 400 and bad.json()["error"]["param"] == next(iter(query))
