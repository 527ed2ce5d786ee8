"""POST /v1/chat/completions over a fake engine: fields, shapes, order of chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_client import chat, events, http_client
from fake_engine_client import EOS, IM_START, FakeClient

from tokenspeed.server.openai.chat import CHAT_REFUSED, ChatRequest
from tokenspeed.server.openai.completions import COMPLETION_REFUSED
from tokenspeed.server.openai.fields import NO_EFFECT, REFUSED
from tokenspeed.text.messages import in_parts

URL = "/v1/chat/completions"


async def test_whole_answer(http: httpx.AsyncClient, engine: FakeClient):
    response = await http.post(URL, json=chat())
    assert response.status_code == 200
    body = response.json()
    assert response.headers["x-request-id"] == body["id"] == engine.requests[0].request_id
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None, "reasoning_content": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": None,
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_stream_order(http: httpx.AsyncClient):
    response = await http.post(URL, json=chat(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    role, *content, finish, usage = events(response.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in content] == [{"content": letter} for letter in "hello"]
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 16
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(chunk["usage"] is None for chunk in (role, *content, finish))
    assert len({chunk["id"] for chunk in (role, *content, finish, usage)}) == 1


async def test_stream_without_usage_says_nothing_of_it(http: httpx.AsyncClient):
    response = await http.post(URL, json=chat(stream=True))
    assert all("usage" not in chunk for chunk in events(response.text))


async def test_continuous_usage_needs_usage(http: httpx.AsyncClient):
    """As in vLLM; alone it changed every chunk."""
    options = {"continuous_usage_stats": True}
    response = await http.post(URL, json=chat(stream=True, stream_options=options))
    assert all("usage" not in chunk for chunk in events(response.text))


async def test_continuous_usage_grows_by_token(http: httpx.AsyncClient):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await http.post(URL, json=chat(stream=True, stream_options=options))).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 4, 5, 6, 6] and chunks[-1]["choices"] == []


async def test_stream_interval_gathers_tokens(engine: FakeClient):
    async with http_client(engine, stream_interval=3) as http:
        chunks = events((await http.post(URL, json=chat(stream=True))).text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "hel", "lo", None]


async def test_n_streams_and_whole(engine: FakeClient):
    engine.reply = lambda request, index: "abc"[: index + 1]
    async with http_client(engine) as http:
        whole = (await http.post(URL, json=chat(n=3))).json()
        chunks = events((await http.post(URL, json=chat(n=3, stream=True))).text)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["a", "ab", "abc"]
    assert whole["usage"]["prompt_tokens"] == 10 and whole["usage"]["completion_tokens"] == 2 + 3 + 4
    texts = ["", "", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["a", "ab", "abc"]
    finished = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


async def test_logprobs(http: httpx.AsyncClient, engine: FakeClient):
    body = (await http.post(URL, json=chat(logprobs=True, top_logprobs=4, max_tokens=1))).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("h", -0.5, [104])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5, -2.5, -9999.0]
    streamed = events((await http.post(URL, json=chat(logprobs=True, stream=True))).text)
    positions = [one for chunk in streamed for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(one["token"] for one in positions) == "hello<eos>"
    assert all(one["top_logprobs"] == [] for one in positions)
    assert engine.requests[-1].sampling.logprobs == 0


@pytest.mark.parametrize("value", [21, 1_000_000, -1])
async def test_a_wrong_top_logprobs_is_called_by_its_name(http: httpx.AsyncClient, value: int):
    """The bug: the answer said that logprobs, which was true, is 1000000."""
    response = await http.post(URL, json=chat(logprobs=True, top_logprobs=value))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "top_logprobs"
    assert error["message"] == f"top_logprobs is {value}, it must be between 0 and 20"


async def test_token_ids_and_prompt_logprobs(http: httpx.AsyncClient):
    body = (await http.post(URL, json=chat(return_token_ids=True, prompt_logprobs=1))).json()
    assert body["choices"][0]["token_ids"] == [*b"hello", EOS]
    assert body["prompt_token_ids"] == [IM_START, *b"user:hi\n", IM_START]
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1] == {"117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    chunks = events((await http.post(URL, json=chat(return_token_ids=True, stream=True))).text)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"hello", EOS]


async def test_stop_reason(http: httpx.AsyncClient):
    choice = (await http.post(URL, json=chat(stop="ll"))).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("he", "stop")
    assert choice["matched_stop"] == choice["stop_reason"] == "ll"
    chunks = events((await http.post(URL, json=chat(stop=["x", "ll"], stream=True))).text)
    assert chunks[-1]["choices"][0]["matched_stop"] == "ll"


async def test_every_sampling_field_arrives(engine: FakeClient):
    async with http_client(engine, allow_priority=True) as http:
        fields = {
            "temperature": 0.3,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.2,
            "frequency_penalty": -0.2,
            "repetition_penalty": 1.2,
            "logit_bias": {"5": 3, "6": -1.5},
            "seed": -4,
            "stop": ["a", "b"],
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        body = chat(**fields, max_completion_tokens=9, priority=-3, cache_salt="s", request_id="mine-1", user="u")
        response = await http.post(URL, json=body)
    assert response.status_code == 200 and response.json()["id"] == "mine-1"
    request = engine.requests[0]
    for name, value in fields.items():
        expected = {5: 3.0, 6: -1.5} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(request.sampling, name) == expected, name
    assert request.sampling.max_tokens == 9
    assert (request.priority, request.cache_salt, request.request_id) == (-3, "s", "mine-1")


async def test_other_names_of_fields(http: httpx.AsyncClient, engine: FakeClient):
    await http.post(URL, json=chat(sampling_seed=3, no_stop_trim=True, rid="r1"))
    request = engine.requests[0]
    assert (request.sampling.seed, request.sampling.include_stop_str_in_output, request.request_id) == (3, True, "r1")


async def test_defaults_come_from_the_model_where_the_request_is_silent():
    engine = FakeClient(sampling_defaults={"temperature": 0.2, "top_k": 20.0, "top_p": 0.9})
    async with http_client(engine) as http:
        await http.post(URL, json=chat())
        await http.post(URL, json=chat(temperature=0, top_k=None))
    silent, loud = (request.sampling for request in engine.requests)
    assert (silent.temperature, silent.top_k, silent.top_p, silent.min_p) == (0.2, 20, 0.9, 0.0)
    assert (loud.temperature, loud.top_k, loud.top_p) == (0.0, 20, 0.9)


async def test_messages_reach_the_template(http: httpx.AsyncClient, engine: FakeClient):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = chat(messages=messages, tools=tools, tool_choice="none", chat_template_kwargs={"enable_thinking": False})
    assert (await http.post(URL, json=body)).status_code == 200
    (seen,) = engine.rendered
    assert seen["messages"] == [
        {"role": "system", "content": "rules"},
        messages[1],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert seen["tools"] == tools and seen["template_kwargs"] == {"enable_thinking": False}
    assert seen["add_generation_prompt"] is True and seen["chat_template"] is None


async def test_continue_final_message(http: httpx.AsyncClient, engine: FakeClient):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]
    response = await http.post(URL, json=chat(messages=messages, continue_final_message=True))
    assert response.status_code == 200
    seen = engine.rendered[0]
    assert (seen["continue_final_message"], seen["add_generation_prompt"]) == (True, False)


CALLING: list[Any] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
]


async def test_a_history_may_hold_refusals(http: httpx.AsyncClient, engine: FakeClient):
    """Another server's, which are text for the model: a conversation does not end with them."""
    parts = [{"type": "text", "text": "sorry"}, {"type": "refusal", "refusal": "I will not."}]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "c"},
    ]
    assert (await http.post(URL, json=chat(messages=talk))).status_code == 200
    contents = [message["content"] for message in engine.rendered[0]["messages"]]
    assert contents == ["a", in_parts(["sorry", "I will not."]), "b", "No.", "c"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "0.5"}, "temperature", "expected float"),
        ({"temperature": 2.5}, "temperature", "between 0.0 and 2.0"),
        ({"temperature": True}, "temperature", "bool"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 10**40}, "max_tokens", "more than 30 digits"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send one"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": 3}, "logprobs", "expected bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tool_choice": "auto"}, "tool_choice", "only for requests with tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo", "unknown field"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "unknown field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strikt": True}}},
            "response_format.json_schema.strikt",
            "unknown field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
            "response_format.json_schema.schema",
            "got str",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "x": 1}},
            "response_format.x",
            "unknown field",
        ),
        ({"regex": "(?=a)b"}, "regex", "look-ahead"),
        ({"regex": "a+", "ebnf": 'root ::= "a"'}, "ebnf", "one of them"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "keyword not"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
        ({"chat_template": "{{ x }}"}, "chat_template", "--chat-template"),
        ({"store": True}, "store", "never stored"),
        ({"priority": 1}, "priority", "--schedule-policy priority"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed", "mean the same"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "number in quotes"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "0 to 299"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"request_id": "new\nline"}, "request_id", "match"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "one way"),
        ({"continue_final_message": True}, "continue_final_message", "role assistant"),
        ({"continue_final_message": True, "messages": CALLING}, "messages[1]", "nothing to continue"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has a field"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "expected array"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "needs text"),
        ({"messages": [{"role": "user", "content": "raise in template"}]}, "messages", "says no"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "messages[0].content[0]",
            "only for role assistant",
        ),
        ({"messages": [{"role": "user", "content": "a", "refusal": "no"}]}, "messages[0].refusal", "assistant"),
        ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages[0].refusal", "one of them"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "text only",
        ),
    ],
)
async def test_refused_by_name(http: httpx.AsyncClient, engine: FakeClient, fields: Any, param: str, words: str):
    response = await http.post(URL, json=chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert words in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "service_tier": "auto", "response_format": {"type": "text"}, "tool_choice": "none"},
        {
            "tools": [],
            "metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "parallel_tool_calls": True,
            "modalities": ["text"],
        },
        {"temperature": None, "n": None, "stop": None, "logit_bias": None, "stream": None, "stream_options": None},
    ],
)
async def test_fields_that_change_nothing_are_taken(http: httpx.AsyncClient, engine: FakeClient, fields: Any):
    assert (await http.post(URL, json=chat(**fields))).status_code == 200
    plain = await http.post(URL, json=chat())
    assert plain.status_code == 200
    assert engine.requests[0].sampling == engine.requests[1].sampling
    assert engine.requests[0].prompt_token_ids == engine.requests[1].prompt_token_ids


async def test_every_field_without_effect_is_taken_and_has_none(http: httpx.AsyncClient, engine: FakeClient):
    samples: dict[str, Any] = {name: "x" for name in NO_EFFECT}
    samples |= {"metadata": {"a": "b"}, "parallel_tool_calls": False, "prompt_cache_options": {"ttl": "1h"}}
    assert (await http.post(URL, json=chat(**samples, request_id="r"))).status_code == 200
    assert (await http.post(URL, json=chat(request_id="r"))).status_code == 200
    assert engine.requests[0] == engine.requests[1]


async def test_every_refused_field_says_so(http: httpx.AsyncClient):
    for name in [*REFUSED, *CHAT_REFUSED]:
        error = (await http.post(URL, json=chat(**{name: ["something"]}))).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_field") and name in error["message"]
    assert not {*REFUSED, *CHAT_REFUSED} & {*ChatRequest.__struct_fields__}


def test_the_page_names_every_field_without_effect_and_every_refused_one():
    page = (Path(__file__).parents[2] / "docs" / "serving" / "chat.md").read_text()
    silent, _, refused = page.partition("## Refused fields")
    assert not [name for name in NO_EFFECT if f"`{name}`" not in silent]
    for where, table in (("", REFUSED), (" (chat)", CHAT_REFUSED), (" (completions)", COMPLETION_REFUSED)):
        for name, (values, why) in table.items():
            taken = ", ".join(f"`{json.dumps(value)}`" for value in values)
            is_silent = name == "parallel_tool_calls" and f"`{name}`" in silent
            assert is_silent or f"| `{name}`{where} | {taken} | {why} |" in refused, name


async def test_a_request_id_is_taken_once_at_a_time(http: httpx.AsyncClient):
    for _ in range(2):  # free again after the end, however it ended
        assert (await http.post(URL, json=chat(request_id="same"))).status_code == 200
    assert (
        await http.post(URL, json=chat(request_id="same", messages=[{"role": "user", "content": "x" * 300}]))
    ).status_code == 400
    assert (await http.post(URL, json=chat(request_id="same", stream=True))).status_code == 200
    assert (await http.post(URL, json=chat(request_id="same", stream=True))).status_code == 200
