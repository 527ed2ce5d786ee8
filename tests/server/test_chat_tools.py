"""Tools in chat: choices, forced calls, cut calls, ids, what the template and the engine are given."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from app_client import chat, events, http_client
from chat_streams import Message, of_choice, of_chunks
from scripted_engine import ScriptedClient

from tokenspeed.grammar.tools import tool_choice_schema
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.server import turn

URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g.h-i"}},
]


def qwen_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def serving(engine: ScriptedClient, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    names = {"tool_call_parser": "qwen", "reasoning_parser": "qwen3"}
    async with http_client(engine, **{**names, **settings}) as http:
        yield http


async def both(http: httpx.AsyncClient, **fields: Any) -> list[Message]:
    """Whole and streamed answers, which must be the same but for random ids."""
    answer = await http.post(URL, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    choices = [of_choice(choice) for choice in answer.json()["choices"]]
    streamed = of_chunks(events((await http.post(URL, json=chat(**fields, stream=True))).text))
    for index, choice in enumerate(choices):
        other = streamed[index]
        assert (other.reasoning, other.content, other.finish_reason) == (
            choice.reasoning,
            choice.content,
            choice.finish_reason,
        )
        assert [call[1:] for call in other.calls] == [call[1:] for call in choice.calls]
    return choices


async def test_a_call_in_all_its_parts():
    engine = ScriptedClient("Hm. " + qwen_call("f", '{"a": 1}'))
    async with serving(engine) as http:
        body = (await http.post(URL, json=chat(tools=TOOLS))).json()
        chunks = events((await http.post(URL, json=chat(tools=TOOLS, stream=True))).text)
    choice = body["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Hm." and choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert call["id"].startswith("call_") and len(call["id"]) == 5 + 24
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first = next(delta for delta in deltas if "tool_calls" in delta)["tool_calls"][0]
    assert first.keys() == {"index", "id", "type", "function"}
    fragments = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d][1:]
    assert "".join(fragments) == '{"a": 1}' and len(fragments) > 1, "arguments come as they are written"


async def test_the_template_sees_the_tools_without_strict():
    engine = ScriptedClient("ok")
    async with serving(engine) as http:
        await http.post(URL, json=chat(tools=TOOLS))
    assert engine.rendered[0]["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g.h-i"}},
    ]
    assert list(engine.rendered[0]["tools"][0]["function"]) == ["name", "description", "parameters"]


async def test_choice_none_leaves_calls_as_text():
    text = qwen_call("f", "{}")
    async with serving(ScriptedClient(text)) as http:
        (one,) = await both(http, tools=TOOLS, tool_choice="none")
    assert (one.content, one.calls, one.finish_reason) == (text, [], "stop")


async def test_without_tools_text_that_looks_like_a_call_is_text():
    text = qwen_call("f", "{}")
    async with serving(ScriptedClient(text)) as http:
        (one,) = await both(http)
    assert (one.content, one.calls) == (text, [])


async def test_an_unknown_name_is_text():
    text = qwen_call("nope", "{}")
    async with serving(ScriptedClient(text)) as http:
        (one,) = await both(http, tools=TOOLS)
    assert (one.content, one.calls, one.finish_reason) == (text, [], "stop")


@pytest.mark.parametrize("max_tokens", [41, 50, 60])
async def test_a_cut_call_is_no_call(max_tokens: int):
    """finish_reason length, and the arguments are a beginning of the real ones."""
    text = qwen_call("f", '{"a": 12345678, "b": "x"}')
    async with serving(ScriptedClient(text)) as http:
        (one,) = await both(http, tools=TOOLS, max_tokens=max_tokens)
    assert one.finish_reason == "length"
    ((_, name, arguments),) = one.calls
    assert (
        name == "f" and '{"a": 12345678, "b": "x"}'.startswith(arguments) and arguments != '{"a": 12345678, "b": "x"}'
    )


async def test_a_broken_call_does_not_finish_as_tool_calls():
    async with serving(ScriptedClient('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>')) as http:
        (one,) = await both(http, tools=TOOLS)
    assert one.finish_reason == "stop"


async def test_several_choices_have_parsers_of_their_own():
    replies = ["no call", qwen_call("f", '{"a": 2}'), "<think>\nHm\n</think>\n\n" + qwen_call("g.h-i", "{}")]
    engine = ScriptedClient(lambda _request, index: replies[index])
    async with serving(engine) as http:
        first, second, third = await both(http, tools=TOOLS, n=3)
    assert (first.content, first.calls, first.finish_reason) == ("no call", [], "stop")
    assert [call[1:] for call in second.calls] == [("f", '{"a": 2}')] and second.finish_reason == "tool_calls"
    assert third.reasoning == "Hm" and [call[1] for call in third.calls] == ["g.h-i"]


@pytest.mark.parametrize("ending", ["stop", "length"])
async def test_one_call_only(ending: str):
    engine = ScriptedClient(qwen_call("f", '{"a": 1}') + "\n" + qwen_call("g.h-i", '{"b": 2}') + " and text")
    engine.ending = ending
    async with serving(engine) as http:
        (both_calls,) = await both(http, tools=TOOLS)
        (one,) = await both(http, tools=TOOLS, parallel_tool_calls=False)
    assert [call[1] for call in both_calls.calls] == ["f", "g.h-i"]
    assert [call[1:] for call in one.calls] == [("f", '{"a": 1}')] and one.content == ""
    assert one.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
async def test_one_call_ends_the_generation(stream: bool, chunk: int):
    """The bug: with `parallel_tool_calls: false` the model wrote on to max_tokens, and all of it but the first call was
    dropped. Now the engine is told to stop there; other choices go on."""
    call = qwen_call("f", '{"a": 1}')
    engine = ScriptedClient(lambda _request, index: ["Hm. " + call + "x" * 500, call * 2, "no call" + "y" * 90][index])
    engine.chunk = chunk
    async with serving(engine) as http:
        body = chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = await http.post(URL, json={**body, **options})
        usage = (events(response.text)[-1] if stream else response.json())["usage"]
        assert usage["completion_tokens"] < len("Hm. " + call) + chunk
        assert engine.closed_early and not engine.running
        choices = await both(http, tools=TOOLS, parallel_tool_calls=False, n=3)
        metrics = (await http.get("/metrics")).text
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls", "stop"]
    assert [choice.content for choice in choices] == ["Hm.", "", "no call" + "y" * 90]
    assert [call[1:] for choice in choices for call in choice.calls] == [("f", '{"a": 1}')] * 2
    assert 'tokenspeed:num_requests_aborted_total{model_name="tiny"} 0.0' in metrics


async def test_ids_of_families_that_number_their_calls_go_on_from_the_history():
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "functions.f:1"}]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
        {"role": "tool", "tool_call_id": "functions.f:1", "content": [{"type": "text", "text": "2"}]},
    ]
    engine = ScriptedClient(text)
    async with serving(engine, tool_call_parser="kimik2", reasoning_parser="passthrough") as http:
        (one,) = await both(http, tools=TOOLS, messages=messages)
        assert [identity for identity, _, _ in one.calls] == ["functions.f:2"]
        assert not engine.requests[0].sampling.skip_special_tokens, "its marks are special tokens"
        engine.reply = '[{"name": "f", "parameters": {"a": 1}}]'
        (forced,) = await both(http, tools=TOOLS, messages=messages, tool_choice="required")
        assert [identity for identity, _, _ in forced.calls] == ["functions.f:2"], "the family's form here, too"
    assert engine.rendered[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {}


async def test_special_tokens_stay_out_where_no_call_can_come():
    engine = ScriptedClient("ok")
    async with serving(engine, tool_call_parser="kimik2", reasoning_parser="passthrough") as http:
        await both(http)
        await both(http, tools=TOOLS, tool_choice="none")
    assert all(request.sampling.skip_special_tokens for request in engine.requests)


async def test_required_and_named_are_forced_by_a_grammar():
    engine = ScriptedClient('[{"name": "f", "parameters": {"a": 1}}, {"name": "g.h-i", "parameters": {}}]')
    async with serving(engine, reasoning_parser="passthrough") as http:
        (one,) = await both(http, tools=TOOLS, tool_choice="required")
        named = {"type": "function", "function": {"name": "g.h-i"}}
        await both(http, tools=TOOLS, tool_choice=named)
        await both(http, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [call[1:] for call in one.calls] == [("f", '{"a": 1}'), ("g.h-i", "{}")]
    assert one.finish_reason == "tool_calls" and one.content == ""
    required, _, of_name, _, single, _ = [json.loads(request.grammar.text) for request in engine.requests]
    assert "maxItems" not in required and len(required["items"]["anyOf"]) == 2
    assert of_name["maxItems"] == 1 and of_name["items"]["properties"]["name"] == {"enum": ["g.h-i"]}
    assert single["maxItems"] == 1 and len(single["items"]["anyOf"]) == 2


async def test_a_forced_call_of_a_tool_without_parameters_has_none():
    """The bug: `{"key": "value"}` was made up for it, in all three APIs."""
    engine = ScriptedClient('[{"name": "f", "parameters": {}}]')
    empty = {"type": "object", "properties": {}}
    user = [{"role": "user", "content": "hi"}]
    async with serving(engine, reasoning_parser="passthrough") as http:
        for schema in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": empty}):
            tools = [{"type": "function", "function": {"name": "f", **schema}}]
            flat = [{"type": "function", "name": "f", **schema}]
            bodies = {
                URL: chat(tools=tools, tool_choice="required"),
                "/v1/responses": {"input": "hi", "tools": flat, "tool_choice": "required"},
            }
            for path, body in bodies.items():
                response = await http.post(path, json=body)
                assert response.status_code == 200, response.text
        for schema in ({}, {"type": "object"}, empty):
            own = [{"name": "f", "input_schema": schema}]
            body = {"model": "tiny", "max_tokens": 99, "messages": user, "tools": own, "tool_choice": {"type": "any"}}
            response = await http.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
    held = [json.loads(request.grammar.text)["$defs"]["tool0"] for request in engine.requests]
    is_open = [schema["additionalProperties"] is not False for schema in held]
    assert is_open == [False] * 9 + [True, False], "only an object of unsaid properties is open"


async def test_a_forced_tool_is_refused_for_a_keyword_only_when_it_is_strict():
    """The bug: one tool with one keyword that cannot be held made the whole request a 400."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
    engine = ScriptedClient('[{"name": "f", "parameters": {"n": 8}}]')
    async with serving(engine, reasoning_parser="passthrough") as http:
        for strict in (None, False, True):
            tool = {"name": "f", "parameters": schema, "strict": strict}
            chat_tools, flat = [{"type": "function", "function": tool}], [{"type": "function", **tool}]
            own = [{"name": "f", "input_schema": schema, **({} if strict is None else {"strict": strict})}]
            for path, body in (
                (URL, chat(tools=chat_tools, tool_choice="required")),
                ("/v1/responses", {"input": "hi", "tools": flat, "tool_choice": "required"}),
                ("/v1/messages", chat(max_tokens=99, tools=own, tool_choice={"type": "any"})),
            ):
                response = await http.post(path, json=body)
                assert response.status_code == (400 if strict else 200), (path, response.text)
                assert not strict or "keyword multipleOf" in response.text


async def test_a_forced_call_that_is_cut_is_no_content():
    """The bug: a forced call that max_tokens cut before its name, or before its arguments, was answered as content:
    `[{"na`. However it is cut, there is no content, and the finish reason is the engine's."""
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {"a": 2}}]'
    colons = [text.index(': {"a": 1'), text.index(': {"a": 2')]
    engine = ScriptedClient(text)
    async with serving(engine, reasoning_parser="passthrough") as http:
        for limit in range(1, len(text)):
            (one,) = await both(http, tools=TOOLS, tool_choice="required", max_tokens=limit)
            assert (one.content, one.finish_reason) == ("", "length"), limit
            assert len(one.calls) == sum(limit > colon for colon in colons), limit
        engine.reply = "[1, 2] is no call"
        (one,) = await both(http, tools=TOOLS, tool_choice="required")
        assert one.content == "[1, 2] is no call", "nothing is lost that is none"


async def test_allowed_tools_are_the_only_ones():
    engine = ScriptedClient(qwen_call("f", "{}") + qwen_call("g.h-i", "{}"))
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g.h-i"}}]},
    }
    async with serving(engine) as http:
        (one,) = await both(http, tools=TOOLS, tool_choice=choice)
    assert [call[1] for call in one.calls] == ["g.h-i"] and '"f"' in one.content
    assert len(engine.rendered[0]["tools"]) == 2, "the prompt shows all of them"


@pytest.mark.parametrize(
    ("path", "choice", "prompt"),
    [
        (URL, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, chat(tools=TOOLS)),
        (
            "/v1/responses",
            {"type": "allowed_tools", "mode": "required", "tools": []},
            {"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        ),
    ],
)
async def test_a_call_of_none_of_the_tools_cannot_be_required(path: str, choice: Any, prompt: dict[str, Any]):
    """The bug: `allowed_tools` of mode required with an empty list was answered with free text."""
    engine = ScriptedClient("text")
    async with serving(engine) as http:
        response = await http.post(path, json={**prompt, "tool_choice": choice})
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
        assert "names no tool" in response.json()["error"]["message"] and not engine.requests
        (choice.get("allowed_tools") or choice)["mode"] = "auto"
        assert (await http.post(path, json={**prompt, "tool_choice": choice})).status_code == 200


async def test_strict_holds_the_models_own_calls_to_their_schemas():
    """The bug: `strict: true` was taken and did nothing with tool_choice auto."""
    engine = ScriptedClient("<think>\nHm\n</think>\n\n" + qwen_call("f", '{"a": 1}'))
    loose = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    async with serving(engine) as http:
        (one,) = await both(http, tools=TOOLS)
        await both(http, tools=TOOLS, thinking_budget=5)
        await both(http, tools=loose)
    assert (one.reasoning, one.finish_reason) == ("Hm", "tool_calls") and len(one.calls) == 1
    strict, _, bounded, _, *others = [request.grammar for request in engine.requests]
    tag, free = json.loads(strict.text)["format"]["tags"]
    assert strict.kind == "structural_tag" and tag["content"]["json_schema"]["required"] == ["a"]
    assert free["content"]["json_schema"] == {"type": "object", "additionalProperties": {}}
    assert strict.starts_after is None, "the free text may be reasoning"
    assert bounded.starts_after == tuple(b"</think>")
    assert others == [None] * 2


@pytest.mark.parametrize(
    ("kinds", "tools", "words"),
    [
        (("json_schema", "regex", "ebnf"), "qwen", "--grammar-backend xgrammar"),
        (("json_schema", "regex", "ebnf"), "llama", "--grammar-backend xgrammar"),
        (("structural_tag",), "gpt-oss", "--grammar-backend xgrammar"),
        ((), "kimi_k3", "--grammar-backend xgrammar"),
        (("structural_tag", "token_tag"), "passthrough", "--tool-call-parser"),
    ],
)
@pytest.mark.parametrize("path", [URL, "/v1/responses", "/v1/messages"])
async def test_strict_that_cannot_be_held_is_refused(kinds: tuple[Any, ...], tools: str, words: str, path: str):
    """The bug: it was taken and ignored."""
    engine = ScriptedClient("Hi", "<|start|>assistant" if tools == "gpt-oss" else "<|im_start|>assistant\n")
    engine.grammar_kinds = frozenset(kinds)
    bodies: dict[str, Any] = {
        URL: chat(tools=TOOLS),
        "/v1/responses": {
            "model": "tiny", "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        },
        "/v1/messages": {
            "model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}],
        },
    }  # fmt: skip
    reasoning = {"gpt-oss": "gpt-oss", "kimi_k3": "kimi_k3"}.get(tools, "passthrough")
    async with serving(engine, tool_call_parser=tools, reasoning_parser=reasoning) as http:
        response = await http.post(path, json=bodies[path])
        assert response.status_code == 400 and not engine.requests
        said = response.json()["error"]["message"]
        assert "strict: true" in said and words in said and "leave strict out" in said
        loose = json.loads(json.dumps(bodies[path]).replace('"strict": true', '"strict": false'))
        assert (await http.post(path, json=loose)).status_code == 200


@pytest.mark.parametrize("name", ["llama", "pythonic", "json"])
async def test_an_answers_beginning_is_held_behind_the_reasoning(name: str):
    """Where only the beginning of an answer tells calls, the constraint waits for the answer."""
    engine = ScriptedClient("Hm\n</think>\n\nHi")
    async with serving(engine, tool_call_parser=name) as http:
        await both(http, tools=TOOLS)
        engine.prompt = "<think>\n\n</think>\n\n"
        await both(http, tools=TOOLS)
    behind, _, at_once, _ = engine.requests
    assert behind.grammar.starts_after == tuple(b"</think>") and at_once.grammar.starts_after is None


async def test_an_answers_schema_beside_tools():
    """The bug: it was refused. With auto, the answer obeys it or is calls; a forced call takes its place."""
    engine = ScriptedClient("Hm\n</think>\n\n" + qwen_call("f", '{"a": 1}'))
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    async with serving(engine) as http:
        (called,) = await both(http, tools=TOOLS, response_format=wanted)
        engine.reply = "</think>\n\n12"
        (answered,) = await both(http, tools=TOOLS, response_format=wanted)
        engine.reply = '</think>\n\n[{"name": "f", "parameters": {"a": 1}}]'
        (forced,) = await both(http, tools=TOOLS, response_format=wanted, tool_choice="required")
    assert (called.reasoning, called.content, called.finish_reason) == ("Hm", "", "tool_calls") and called.calls
    assert (answered.content, answered.calls) == ("12", []) and forced.calls
    grammar, _, _, _, of_calls, _ = [request.grammar for request in engine.requests]
    assert [each["type"] for each in json.loads(grammar.text)["format"]["elements"]] == [
        "json_schema",
        "tags_with_separator",
    ]
    assert grammar.starts_after == tuple(b"</think>")
    assert of_calls.kind == "json_schema" and json.loads(of_calls.text)["type"] == "array"
    async with serving(engine, tool_call_parser="llama") as http:
        response = await http.post(URL, json=chat(tools=TOOLS, response_format=wanted))
        assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


async def test_auto_needs_a_known_format():
    """SmolLM2, say: nothing could read its calls, so none are promised."""
    async with http_client(ScriptedClient('[{"name": "f", "parameters": {"a": 1}}]')) as http:
        error = (await http.post(URL, json=chat(tools=TOOLS))).json()["error"]
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        assert "send tool_choice 'none', 'required' or a function, or" in error["message"]
        (one,) = await both(http, tools=TOOLS, tool_choice="required")
        assert [call[1] for call in one.calls] == ["f"]
    async with http_client(ScriptedClient("x"), tool_call_parser="passthrough") as http:
        assert (await both(http, tools=TOOLS[1:]))[0].content == "x"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "with tools"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", "with tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which is not among tools: 'f', 'g.h-i'",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2]", "two functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "retrieval"),
        (
            {"tools": TOOLS, "response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format",
            "tool_choice",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "regex": "a"},
            "regex",
            "leave regex out",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"not": {"type": "null"}}}},
                            "strict": True,
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "the parameters of the tool 'f': #/properties/a/not: the keyword not",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ],
)
async def test_refused_by_name(fields: Any, param: str, words: str):
    engine = ScriptedClient("x")
    async with serving(engine) as http:
        response = await http.post(URL, json=chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert not engine.requests


async def test_logprobs_and_ids_are_all_there_when_calls_are_streamed():
    engine = ScriptedClient(qwen_call("f", '{"a": 1}'))
    async with serving(engine, stream_interval=7) as http:
        fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
        body = (await http.post(URL, json=chat(**fields))).json()["choices"][0]
        chunks = events((await http.post(URL, json=chat(**fields, stream=True))).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for choice in choices for i in choice.get("token_ids", ())] == body["token_ids"]
    assert len(body["logprobs"]["content"]) == len(body["token_ids"])
    streamed = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == body["logprobs"]["content"]
    assert of_chunks(chunks)[0].calls[0][1:] == ("f", '{"a": 1}')


async def test_many_long_schemas_of_a_forced_call_leave_the_loop(monkeypatch: pytest.MonkeyPatch):
    """Two hundred schemas of 40 kB held every other request up for a second."""
    threads: list[int] = []

    def noted(*args: Any) -> GrammarSpec:
        threads.append(threading.get_ident())
        return tool_choice_schema(*args)

    monkeypatch.setattr(turn, "tool_choice_schema", noted)
    properties = {f"p{place}": {"type": "string", "description": "x" * 250} for place in range(100)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    async with serving(ScriptedClient('[{"name": "f", "parameters": {}}]')) as http:
        answer = await http.post(URL, json=chat(tools=tools, tool_choice="required"))
    assert answer.status_code == 200, answer.text
    assert len(threads) == 1 and threading.get_ident() not in threads
