"""Reasoning in chat: switches of the template, where it begins, tokens counted, constraints behind it."""

from __future__ import annotations

from typing import Any

import pytest
from app_client import chat, events, http_client
from chat_streams import of_choice, of_chunks
from scripted_engine import ScriptedClient

from tokenspeed.protocol.sampling import ThinkingBudget
from tokenspeed.server.rendering import Conversation
from tokenspeed.server.turn import TurnRequest, template_switches

URL = "/v1/chat/completions"
NUM_THOUGHT = len(">\nHm.\n</think>")  # a token a byte: a tag counts from the token on that completes it
THOUGHT = "<think>\nHm.\n</think>\n\nYes."


async def answer(
    engine: ScriptedClient, parser: str = "qwen3", tools_parser: str = "auto", **fields: Any
) -> dict[str, Any]:
    async with http_client(engine, reasoning_parser=parser, tool_call_parser=tools_parser) as http:
        response = await http.post(URL, json=chat(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(engine: ScriptedClient, parser: str = "qwen3", **fields: Any) -> list[Any]:
    async with http_client(engine, reasoning_parser=parser) as http:
        return events((await http.post(URL, json=chat(stream=True, **fields))).text)


async def test_reasoning_is_apart_and_its_tokens_are_counted():
    body = await answer(ScriptedClient(THOUGHT))
    one = of_choice(body["choices"][0])
    assert (one.reasoning, one.content, one.finish_reason) == ("Hm.", "Yes.", "stop")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    usage = (await chunks(ScriptedClient(THOUGHT), stream_options={"include_usage": True}))[-1]["usage"]
    assert usage["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
    assert usage["completion_tokens"] == len(THOUGHT) + 1


async def test_continuous_usage_counts_reasoning_as_it_comes():
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await chunks(ScriptedClient(THOUGHT), stream_options=options)
    counts = [chunk["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0) for chunk in got]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == NUM_THOUGHT


async def test_without_reasoning_nothing_is_said_of_it():
    body = await answer(ScriptedClient("Yes."))
    assert body["choices"][0]["message"]["reasoning_content"] is None
    assert "completion_tokens_details" not in body["usage"]


async def test_the_prompts_end_says_whether_reasoning_has_begun():
    inside = of_choice((await answer(ScriptedClient("Hm.\n</think>\n\nYes.", "a\n<think>\n")))["choices"][0])
    assert (inside.reasoning, inside.content) == ("Hm.", "Yes.")
    closed = "a\n<think>\n\n</think>\n\n"
    behind = of_choice((await answer(ScriptedClient("a</think>", closed)))["choices"][0])
    assert (behind.reasoning, behind.content) == ("", "a</think>")


async def test_together_on_request():
    one = of_choice((await answer(ScriptedClient(THOUGHT), separate_reasoning=False))["choices"][0])
    assert (one.reasoning, one.content) == ("", THOUGHT)


async def test_in_one_piece_on_request():
    got = await chunks(ScriptedClient(THOUGHT), stream_reasoning=False)
    pieces = [
        c["choices"][0]["delta"]["reasoning_content"] for c in got if "reasoning_content" in c["choices"][0]["delta"]
    ]
    assert pieces == ["Hm."]
    cut = await chunks(ScriptedClient(THOUGHT), stream_reasoning=False, max_tokens=10)
    message = of_chunks(cut)[0]
    assert (message.reasoning, message.content, message.finish_reason) == ("Hm"[: 10 - len("<think>\n")], "", "length")


async def test_reasoning_comes_before_content():
    got = of_chunks(await chunks(ScriptedClient(THOUGHT)))[0]
    assert (got.reasoning, got.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("variables", "fields", "kwargs", "said"),
    [
        ({"enable_thinking"}, {}, {}, None),
        ({"enable_thinking"}, {"reasoning_effort": "none"}, {"enable_thinking": False}, False),
        ({"thinking"}, {"reasoning_effort": "minimal"}, {"thinking": False}, False),
        ({"thinking"}, {"reasoning_effort": "high"}, {"thinking": True, "reasoning_effort": "high"}, True),
        ({"messages"}, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}, None),
        ({"reasoning_effort"}, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
        ({"enable_thinking"}, {"thinking": False}, {"enable_thinking": False}, False),
        ({"messages"}, {"thinking": True}, {}, None),
        (
            {"enable_thinking"},
            {"reasoning_effort": "none", "template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            True,
        ),
        (set(), {"template_kwargs": {"thinking": False}}, {"thinking": False}, False),
    ],
)
def test_switches(variables: set[str], fields: dict[str, Any], kwargs: dict[str, Any], said: bool | None):
    talk = Conversation(messages=[], template_kwargs=fields.pop("template_kwargs", {}))
    assert template_switches(TurnRequest(conversation=talk, **fields), frozenset(variables)) == (kwargs, said)


async def test_effort_reaches_the_template():
    engine = ScriptedClient("x")
    engine.template_variables = frozenset({"enable_thinking"})
    await answer(engine, reasoning_effort="none", chat_template_kwargs={"extra": 1})
    assert engine.rendered[0]["template_kwargs"] == {"extra": 1, "enable_thinking": False}


async def test_earlier_reasoning_reaches_the_template():
    engine = ScriptedClient("x")
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "r"}, {"role": "user", "content": "b"}]
    await answer(engine, messages=messages)
    assert engine.rendered[0]["messages"][0] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


async def test_documents_go_to_templates_that_read_them():
    engine = ScriptedClient("x")
    async with http_client(engine) as http:
        error = (await http.post(URL, json=chat(documents=[{"text": "d"}]))).json()["error"]
        assert error["param"] == "documents" and "does not read them" in error["message"]
        engine.template_variables = frozenset({"documents"})
        assert (await http.post(URL, json=chat(documents=[{"text": "d"}]))).status_code == 200
    assert engine.rendered[-1]["documents"] == [{"text": "d"}]


HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
CONSTRAINED = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("parser", "prompt", "fields", "opened", "marker"),
    [
        ("passthrough", "a", {}, "", None),
        ("qwen3_thinking", "a<think>\n", {}, "", "</think>"),
        ("qwen3", "a<think>\n\n</think>\n\n", {}, "", None),  # thinking is off: the constraint starts at once
        ("qwen3", "a", {}, "<think>", "</think>"),  # the model would open it; now it is certain
        ("qwen3", "a", {"chat_template_kwargs": {"enable_thinking": False}}, "", None),
        ("gpt-oss", "<|start|>assistant", {}, "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        ("kimi_k3", "<|open|>think<|sep|>", {}, "", "<|close|>think<|sep|>"),
        ("kimi_k3", "<|open|>response<|sep|>", {}, "", None),
    ],
)
async def test_a_constraint_starts_behind_the_reasoning(
    parser: str, prompt: str, fields: dict[str, Any], opened: str, marker: str | None
):
    engine = ScriptedClient("{}", prompt)
    await answer(engine, parser, **CONSTRAINED, **fields)
    (request,) = engine.requests
    encode = engine.tokenizer.encode
    assert request.prompt_token_ids == encode(prompt + opened, False, True)
    assert request.grammar.starts_after == (None if marker is None else tuple(encode(marker, False, True)))


async def test_harmony_has_one_way_from_the_reasoning_to_a_constraint():
    """The bug: behind its analysis a model could write to another channel, or a longer header than the constraint
    waited for: it never started, and what obeyed nothing was the answer."""
    engine = ScriptedClient("Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}", "<|start|>assistant")
    await answer(engine, "gpt-oss", **CONSTRAINED)
    await answer(engine, "qwen3", **CONSTRAINED)
    encode = engine.tokenizer.encode
    first, other = (request.grammar for request in engine.requests)
    assert list(first.bridge) == encode("<|end|><|start|>assistant<|channel|>final<|message|>", False, True)
    assert list(first.withheld) == encode("<|start|><|channel|><|return|><|call|>", False, True)
    assert other.bridge == other.withheld == ()


async def test_a_constrained_answer_without_reasoning_is_in_the_final_channel():
    """The bug: with `enable_thinking` false the constraint held the header of the message, and the JSON was lost."""
    engine = ScriptedClient('{"a": 1}', "<|start|>assistant")
    fields = {**CONSTRAINED, "chat_template_kwargs": {"enable_thinking": False}}
    one = of_choice((await answer(engine, "gpt-oss", **fields))["choices"][0])
    assert one.content == '{"a": 1}'
    prompt = engine.tokenizer.encode("<|start|>assistant<|channel|>final<|message|>", False, True)
    assert engine.requests[0].prompt_token_ids == prompt and engine.requests[0].grammar.starts_after is None


async def test_harmonys_whole_output_is_constrained_where_calls_are_the_models_choice():
    """From its first header on, or behind the reasoning that the prompt or a budget has opened."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    engine = ScriptedClient(f"{HARMONY_CALL}<|call|>", "<|start|>assistant")
    encode, wanted = engine.tokenizer.encode, {"tools": [tool]}
    for fields in (wanted, wanted | CONSTRAINED):
        one = of_choice((await answer(engine, "gpt-oss", tools_parser="gpt-oss", **fields))["choices"][0])
        assert [call[1:] for call in one.calls] == [("f", "{}")]
        grammar = engine.requests[-1].grammar
        assert (grammar.kind, grammar.starts_after, grammar.bridge) == ("token_tag", None, ())
        await answer(engine, "gpt-oss", tools_parser="gpt-oss", thinking_budget=5, **fields)
        request, over = engine.requests[-1], engine.tokenizer.token_to_id("<|end|>")
        opened = encode("<|start|>assistant<|channel|>analysis<|message|>", False, True)
        assert request.prompt_token_ids == opened and request.grammar.starts_after == (over,)
        assert request.sampling.thinking == ThinkingBudget(5, (over,), (over,), over)
        assert list(request.grammar.withheld) == encode("<|start|><|channel|><|return|><|call|>", False, True)
        assert request.grammar.bridge == ()
        engine.prompt = "<|start|>assistant<|channel|>final<|message|>"
        await answer(engine, "gpt-oss", tools_parser="gpt-oss", **fields)
        begun = engine.requests[-1].grammar
        assert begun is None if fields is wanted else (begun.kind, begun.starts_after) == ("json_schema", None)
        engine.prompt = "<|start|>assistant"


async def test_a_forced_call_behind_reasoning():
    tools = [{"type": "function", "function": {"name": "f"}}]
    engine = ScriptedClient('Hm.\n</think>\n\n[{"name": "f", "parameters": {"a": "</think>"}}]', "a<think>\n")
    one = of_choice((await answer(engine, tools=tools, tool_choice="required"))["choices"][0])
    assert one.reasoning == "Hm." and [call[1:] for call in one.calls] == [("f", '{"a": "</think>"}')]
    assert engine.requests[0].grammar.starts_after == tuple(b"</think>")


async def test_a_continued_answer_is_constrained_at_once():
    engine = ScriptedClient("}", "<think>\nx\n</think>\n\n{")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "{"}]
    await answer(engine, messages=messages, continue_final_message=True, **CONSTRAINED)
    assert engine.requests[0].grammar.starts_after is None


async def test_a_continued_answer_that_still_reasons_is_constrained_behind_that():
    """The bug: an open block in the continued message was not seen, and the constraint held the reasoning itself."""
    engine = ScriptedClient("!\n</think>\n\n{}", "assistant\n<think>\nHm")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nHm"}]
    one = of_choice((await answer(engine, messages=messages, continue_final_message=True, **CONSTRAINED))["choices"][0])
    assert engine.requests[0].grammar.starts_after == tuple(b"</think>")
    assert (one.reasoning, one.content) == ("!", "{}")


@pytest.mark.parametrize(
    ("parser", "prompt", "opened", "ends", "closing"),
    [
        ("qwen3", "a\n<think>\n", "", "</think>", "</think>"),
        ("qwen3", "a\n", "<think>", "</think>", "</think>"),
        ("qwen3", "a\n<think>\n\n</think>\n\n", "", None, None),
        ("passthrough", "a\n", "", None, None),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
async def test_a_budget_of_thinking_reaches_the_engine(
    parser: str, prompt: str, opened: str, ends: str | None, closing: str | None
):
    """The bug: `thinking.budget_tokens` of /v1/messages was taken and did nothing."""
    engine = ScriptedClient("x", prompt)
    if parser != "passthrough":
        await answer(engine, parser, thinking_budget=7)
    async with http_client(engine, reasoning_parser=parser) as http:
        thinking = {"type": "enabled", "budget_tokens": 7}
        messages = [{"role": "user", "content": "q"}]
        body = {"model": "tiny", "max_tokens": 9, "messages": messages, "thinking": thinking}
        assert (await http.post("/v1/messages", json=body)).status_code == 200
    encode = engine.tokenizer.encode
    for request in engine.requests:
        assert request.prompt_token_ids == encode(prompt + opened, False, True)
        if ends is None or closing is None:
            assert request.sampling.thinking is None
        else:
            over_at = engine.tokenizer.token_to_id("<|end|>") if parser == "gpt-oss" else None
            wanted = ThinkingBudget(7, tuple(encode(ends, False, True)), tuple(encode(closing, False, True)), over_at)
            assert request.sampling.thinking == wanted


async def test_a_budget_without_reasoning_is_refused_in_chat():
    """The bug: it was taken and did nothing. /v1/messages takes it: agents send it whatever the model."""
    engine = ScriptedClient("x", "a\n")
    async with http_client(engine, reasoning_parser="passthrough") as http:
        response = await http.post(URL, json=chat(thinking_budget=7))
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_budget"
    assert "no format of reasoning is known for this model" in response.json()["error"]["message"]
    assert engine.requests == []


async def test_a_stop_token_of_the_request_is_no_text():
    engine = ScriptedClient("<think>\nHm.\n</think>\n\nYes!!")
    body = await answer(engine, stop_token_ids=[ord("!")])
    one = of_choice(body["choices"][0])
    assert (one.reasoning, one.content) == ("Hm.", "Yes") and body["choices"][0]["matched_stop"] == ord("!")
