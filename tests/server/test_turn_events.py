"""What becomes of the engine's events on their way out: gathered by `stream_interval`, counted, and how they end."""

from __future__ import annotations

from typing import Any

import pytest
from app_client import chat, http_client
from fake_engine_client import ByteTokenizer, FakeClient
from test_responses_api import CALLS, typed_events

from tokenspeed.engine.interface import GenerationEvent
from tokenspeed.server.turn_reader import TurnReader
from tokenspeed.text.parsers.interface import ParseContext, ToolCallAbandoned, ToolCallStart, ToolSpec, assemble
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats

RESPONSES: dict[str, Any] = {"input": "hi", "stream": True}
MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("interval", "pieces"),
    [(1, list("abcdefghij")), (4, ["a", "bcde", "fghi", "j"]), (9, ["a", "bcdefghij"]), (50, ["a", "bcdefghij"])],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_typed_events_are_gathered(engine: FakeClient, path: str, interval: int, pieces: list[str]):
    """The first token at once, then as many together as `stream_interval` says, whatever is left at the end."""
    engine.reply = "abcdefghij"
    async with http_client(engine, stream_interval=interval) as http:
        response = await http.post(path, json=RESPONSES if path == "/v1/responses" else {**MESSAGES, "stream": True})
    assert response.status_code == 200, response.text
    deltas = [event.get("delta") for event in typed_events(response.text) if event["type"].endswith("delta")]
    texts = [
        delta["text"] if isinstance(delta, dict) else delta for delta in deltas if delta and "stop_reason" not in delta
    ]
    assert texts == pieces


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_of_the_first_sequence(engine: FakeClient, stream: bool):
    """Its siblings find all of the prompt that it has just computed, which says nothing of the cache."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with http_client(engine) as http:
        response = await http.post("/v1/chat/completions", json=chat(n=3, **options))
    text = response.text if not stream else response.text.split("\n\n")[-3]
    assert '"cached_tokens":2}' in text, text


@pytest.mark.parametrize(("reason", "told"), [("abort", "abort"), ("error", "error"), ("stop", "tool_calls")])
@pytest.mark.parametrize("one_call", [False, True])
def test_what_failed_is_no_call(reason: Any, told: str, one_call: bool):
    """A whole call in the event by which a sequence is aborted, or fails, does not make its end a good one."""
    reader = TurnReader(
        reasoning_formats()["passthrough"],
        tool_formats()["qwen"],
        ParseContext(tools=(ToolSpec("weather"),)),
        num_choices=1,
        parses_calls=True,
        one_call=one_call,
        separate_reasoning=True,
        stream_reasoning=True,
        counting=ByteTokenizer(),
        skips_special_tokens=True,
    )
    delta = reader.read(GenerationEvent(0, text=CALLS, token_ids=list(CALLS.encode()), finish_reason=reason))
    assert any(isinstance(each, ToolCallStart) for each in delta.deltas)
    assert delta.finish_reason == told and reader.is_done()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_one_call_that_is_malformed_is_not_made_good_by_the_next(size: int):
    """The bug: where both came in one event, the second call made the end of the first `tool_calls`."""
    reader = TurnReader(
        reasoning_formats()["passthrough"],
        tool_formats()["qwen"],
        ParseContext(tools=(ToolSpec("weather"),)),
        num_choices=1,
        parses_calls=True,
        one_call=True,
        separate_reasoning=True,
        stream_reasoning=True,
        counting=ByteTokenizer(),
        skips_special_tokens=True,
    )
    text = '<tool_call>{"name": "weather", "arguments": {}, "name": "x"}</tool_call>' + CALLS
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    deltas, told = [], None
    for part in parts:
        if told is None:
            read = reader.read(GenerationEvent(0, text=part, token_ids=list(part.encode())))
            deltas, told = deltas + read.deltas, read.finish_reason
    assert told == "stop" and sum(isinstance(each, ToolCallStart) for each in deltas) == 1
    assert assemble(deltas).content.startswith('"x"}</tool_call>') and ToolCallAbandoned(0) in deltas
