"""Every field and value that the installed SDKs' types name is taken, or refused by name and with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from sdk_bodies import probes

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.anthropic import request as anthropic
from tokenspeed.server.openai import chat, completions
from tokenspeed.server.responses_api import request as responses

MESSAGES = [{"role": "user", "content": "hi"}]
LEAST = {"model": "x", "max_tokens": 5, "messages": MESSAGES}
APIS: dict[str, tuple[Any, dict[str, Any], Callable[[dict[str, Any]], Any], int]] = {
    "chat": (chat_params.CompletionCreateParamsStreaming, {"model": "x", "messages": MESSAGES}, chat.parse, 300),
    "completions": (text_params.CompletionCreateParamsStreaming, {"model": "x", "prompt": "a"}, completions.parse, 40),
    "responses": (response_params.ResponseCreateParamsStreaming, {"model": "x", "input": "a"}, responses.parse, 1000),
    "messages": (message_params.MessageCreateParamsStreaming, LEAST, anthropic.parse, 900),
    "beta messages": (beta_params.MessageCreateParamsStreaming, LEAST, anthropic.parse, 1200),
    "count": (count_params.MessageCountTokensParams, {"model": "x", "messages": MESSAGES}, anthropic.parse_count, 900),
}  # fmt: skip
HEADERS = {"betas"}  # the SDK sends it as one


@pytest.mark.parametrize("api", APIS)
def test_every_field_of_the_sdk_is_known(api: str):
    """Fields of newer SDKs were unknown, and values of theirs "invalid", with no word of why."""
    root, least, parse, at_least = APIS[api]
    parse(least)
    unknown: set[str] = set()
    num_probes = 0
    for probe in probes(root, least):
        num_probes += 1
        try:
            parse(probe.body)
        except InvalidRequest as error:
            if probe.path[0] not in HEADERS and ("unknown field" in error.message or "Invalid" in error.message):
                unknown.add(f"{probe.name}: {error.message}")
    assert not unknown
    assert num_probes >= at_least, "the SDK's types were not found"


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("responses", {"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("responses", {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                                  "async": True}]}, "input[0].async"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ("chat", {"tools": [], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ("chat", {"messages": [{"role": "function", "name": "f", "content": "1"}]}, "messages[0].role"),
        ("messages", {"thinking": {"type": "between_tools"}}, "thinking.type"),
        ("messages", {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "toolset_name": "browser"}]}]},
         "messages[0].content[0].toolset_name"),
        ("messages", {"fallbacks": [{"model": "y"}]}, "fallbacks"),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_by_name(api: str, fields: dict[str, Any], param: str):
    _, least, parse, _ = APIS[api]
    with pytest.raises(InvalidRequest) as refused:
        parse({**least, **fields})
    assert refused.value.param == param
    assert "unknown field" not in refused.value.message and "Invalid" not in refused.value.message


BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("responses", {"reasoning": {"generate_summary": None}}),
        ("responses", {"reasoning": {"generate_summary": "auto", "context": "auto", "mode": "standard"}}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", **BREAKPOINT}]}]}),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                                  "caller": {"type": "direct"}, "async": False}]}),
        ("responses", {"tools": [{"type": "web_search"}], "include": ["web_search_call.action.sources"]}),
        ("responses", {"prompt_cache_options": {"mode": "explicit"}}),
        ("chat", {"prompt_cache_options": {"ttl": "30m"}}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **BREAKPOINT}]}]}),
        ("messages", {"tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": True,
                                 "input_examples": [{}]}]}),
        ("messages", {"fallbacks": None, "compaction": None}),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken(api: str, fields: dict[str, Any]):
    _, least, parse, _ = APIS[api]
    parse({**least, **fields})
