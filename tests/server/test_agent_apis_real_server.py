"""`/v1/responses` and `/v1/messages` of `tokenspeed serve` on the embedded model, through the two official SDKs.

What the model says is not the subject: whole and streamed answers are compared with each other and with chat's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from test_real_server import MESSAGES, Server, started, until

from tokenspeed.checkpoint.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(300)

TEXT = MESSAGES[0]["content"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_checkpoint: Checkpoint) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("agents")) as running:
        yield running


@pytest.fixture(scope="module")
def messages_sdk(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_three_apis_one_answer(server: Server, messages_sdk: anthropic.Anthropic):
    chat = server.openai.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=24)
    response = server.openai.responses.create(model="smol", input=TEXT, temperature=0, max_output_tokens=24)
    fields: dict[str, Any] = {"model": "smol", "max_tokens": 24, "messages": MESSAGES}
    fields["extra_body"] = {"temperature": 0}
    message = messages_sdk.messages.create(**fields)
    text = chat.choices[0].message.content
    assert response.output_text == text and message.content[0].type == "text" and message.content[0].text == text
    assert response.status == "incomplete" and message.stop_reason == "max_tokens"

    with server.openai.responses.stream(model="smol", input=TEXT, temperature=0, max_output_tokens=24) as events:
        assert [event.type for event in events][-1] == "response.incomplete"
    with messages_sdk.messages.stream(**fields) as stream:
        assert stream.get_final_text() == text
    assert chat.usage and response.usage
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    used = message.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert used.output_tokens == response.usage.output_tokens == 24
    assert messages_sdk.messages.count_tokens(model="smol", messages=fields["messages"]).input_tokens == (
        chat.usage.prompt_tokens
    )


def test_a_conversation_goes_on_from_the_cache(server: Server):
    first = server.openai.responses.create(model="smol", input=TEXT, temperature=0, max_output_tokens=32)
    second = server.openai.responses.create(
        model="smol", input="And now to ten.", previous_response_id=first.id, temperature=0, max_output_tokens=4
    )
    assert first.usage and second.usage
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2
    talk: list[Any] = [{"role": "user", "content": TEXT}, *first.output, {"role": "user", "content": "And now to ten."}]
    again = server.openai.responses.create(model="smol", input=talk, temperature=0, max_output_tokens=4)
    assert again.output_text == second.output_text
    assert again.usage and again.usage.input_tokens == second.usage.input_tokens


def test_a_forced_call_has_a_whole_input(server: Server, messages_sdk: anthropic.Anthropic):
    """The grammar of a forced call, through the engine: a model of this size would hardly make one by itself."""
    schema: Any = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    message = messages_sdk.messages.create(
        model="smol",
        max_tokens=64,
        messages=MESSAGES,
        tools=[{"name": "weather", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"temperature": 0},
    )
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "weather" and call.input["unit"] in ("C", "F")


def test_json_schema_text(server: Server):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    response = server.openai.responses.create(
        model="smol",
        input=TEXT,
        temperature=0,
        max_output_tokens=32,
        text={
            "format": {"type": "json_schema", "name": "verdict", "schema": {**schema, "additionalProperties": False}}
        },
    )
    assert response.status == "completed" and json.loads(response.output_text)["ok"] in (True, False)


def test_a_disconnect_frees_the_pages(server: Server):
    for path, body in (
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 400, "ignore_eos": True, "stream": True}),
        ("/v1/messages", {"model": "smol", "messages": MESSAGES, "max_tokens": 400, "stream": True}),
    ):
        with server.http.stream("POST", path, json=body) as response:
            next(response.iter_bytes())
        until(lambda: server.stats()["num_running"] == 0)
        assert server.stats()["num_pages_used"] == 0
    assert server.http.post("/debug/check").status_code == 200


def test_a_schema_that_cannot_be_compiled_is_a_400(server: Server):
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.responses.create(
            model="smol",
            input=TEXT,
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "(?=a)"}}},
        )
    assert bad.value.param and bad.value.param.startswith("text.format")
