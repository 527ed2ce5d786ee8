"""POST /v1/messages/count_tokens over a fake engine: it counts what a message's prompt takes, and needs no schema."""

from __future__ import annotations

from typing import Any

import pytest
from app_client import http_client
from fake_engine_client import FakeClient
from test_anthropic_api import COUNT, URL, WEATHER, body
from test_responses_api import PARSERS


async def test_count_tokens_is_what_a_message_takes(engine: FakeClient):
    async with http_client(engine, **PARSERS) as http:
        fields = body(tools=[WEATHER], system="be brief")
        used = (await http.post(URL, json=fields)).json()["usage"]
        del fields["max_tokens"]
        counted = (await http.post(COUNT, json=fields)).json()
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert len(engine.requests) == 1


FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "parsers", [PARSERS, {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"}, {"tool_call_parser": "json"}]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}, "output_config": FORMAT},
        {"tools": [WEATHER], "output_config": FORMAT},
        {"tools": [{**WEATHER, "strict": True}]},
        {"output_config": FORMAT},
        {"thinking": {"type": "enabled", "budget_tokens": 10}},
        {"thinking": {"type": "enabled", "budget_tokens": 10}, "tools": [{**WEATHER, "strict": True}]},
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}],
            "output_config": FORMAT,
            "tools": [WEATHER],
        },
    ],
)
async def test_count_tokens_counts_how_the_prompt_ends(engine: FakeClient, parsers: dict[str, str], fields: Any):
    """Constraints and budgets open the reasoning in the prompt."""
    marks = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
    ids = {mark: 270 + number for number, mark in enumerate(marks)}
    engine.tokenizer.token_to_id = ids.get  # type: ignore[method-assign]
    async with http_client(engine, **parsers) as http:
        answer = await http.post(URL, json=body(**fields))
        count = await http.post(
            COUNT, json={key: value for key, value in body(**fields).items() if key != "max_tokens"}
        )
    assert count.status_code == 200, count.text
    if answer.status_code == 200:
        assert count.json() == {"input_tokens": len(engine.requests[0].prompt_token_ids)}
    else:  # calls, or a schema beside them, that this format has no grammar for
        assert parsers == {"tool_call_parser": "json"} and "tools" in fields, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}], "tool_choice": {"type": "any"}},
        {"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
    ],
)
async def test_count_tokens_needs_no_schema(engine: FakeClient, fields: Any):
    """The bug: a schema that cannot be enforced was a 400 there, too."""
    async with http_client(engine, **PARSERS) as http:
        assert (await http.post(URL, json=body(**fields))).status_code == 400
        count = await http.post(
            COUNT, json={key: value for key, value in body(**fields).items() if key != "max_tokens"}
        )
        assert count.status_code == 200 and count.json()["input_tokens"] > 0
    async with http_client(engine) as http:  # no format of calls is known here
        count = await http.post(
            COUNT, json={key: value for key, value in body(**fields).items() if key != "max_tokens"}
        )
        assert count.status_code == 200
