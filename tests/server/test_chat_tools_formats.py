"""Every parser's samples through a real server and the official client: whole and streamed answers are the same, and
are what the sample says."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_streams import Message, of_choice, of_chunks
from fake_server import running
from scripted_engine import ScriptedClient

from tokenspeed.text.parsers.interface import Example
from tokenspeed.text.parsers.registry import reasoning_examples, tool_examples

HI: list[Any] = [{"role": "user", "content": "hi"}]


def official(url: str) -> openai.AsyncOpenAI:
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # reading certificates takes a third of a second
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain)


def tools_of(example: Example) -> list[Any]:
    """What the request offers. Samples that take any name get the names they call."""
    if example.tools is not None:
        offered = {tool.name: dict(tool.parameters) for tool in example.tools}
    else:
        offered = {name: {} for name, _ in example.calls} or {"another": {}}
    return [
        {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
        for name, schema in offered.items()
    ]


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[int, Message]:
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, **fields)
    return of_chunks([chunk.model_dump(exclude_unset=True) async for chunk in stream])


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> list[Message]:
    answer = await client.chat.completions.create(model="tiny", messages=HI, **fields)
    return [of_choice(choice) for choice in answer.model_dump(exclude_unset=True)["choices"]]


def without_ids(message: Message) -> Message:
    calls = [("", name, arguments) for _, name, arguments in message.calls]
    return Message(message.reasoning, message.content, calls, message.finish_reason)


def check(message: Message, example: Example, with_calls: bool) -> None:
    assert (message.reasoning, message.content) == (example.reasoning, example.content)
    assert [name for _, name, _ in message.calls] == [name for name, _ in example.calls]
    for (identity, _, arguments), (_, wanted) in zip(message.calls, example.calls, strict=True):
        assert identity
        assert (arguments if example.incomplete else json.loads(arguments)) == wanted
    is_whole = with_calls and example.calls and not example.incomplete and example.finish_reason == "stop"
    assert message.finish_reason == ("tool_calls" if is_whole else example.finish_reason)


async def drive(engine: ScriptedClient, client: openai.AsyncOpenAI, example: Example, fields: dict[str, Any]) -> None:
    engine.reply, engine.ending = example.text, example.finish_reason
    engine.prompt = example.prompt or "<|im_start|>assistant\n"
    for chunk in (1, 6):
        engine.chunk = chunk
        (one,) = await whole(client, **fields)
        check(one, example, with_calls="tools" in fields)
        parts = await streamed(client, **fields)
        assert without_ids(parts[0]) == without_ids(one)


@pytest.mark.parametrize("name", sorted(tool_examples()))
async def test_every_tool_parser(name: str):
    engine = ScriptedClient()
    async with (
        running(engine, tool_call_parser=name, reasoning_parser="passthrough") as server,
        official(server.url) as client,
    ):
        for example in tool_examples()[name]:
            await drive(engine, client, example, {"tools": tools_of(example)})


@pytest.mark.parametrize("name", sorted(reasoning_examples()))
async def test_every_reasoning_parser(name: str):
    engine = ScriptedClient()
    async with (
        running(engine, tool_call_parser="passthrough", reasoning_parser=name) as server,
        official(server.url) as client,
    ):
        for example in reasoning_examples()[name]:
            await drive(engine, client, example, {})


PAIRS = [
    ("qwen3", "qwen", "<think>\nHm.\n</think>\n\n", "Hm.", "<|im_start|>assistant\n"),
    ("qwen3_thinking", "qwen_coder", "Hm.\n</think>\n\n", "Hm.", "assistant\n<think>\n"),
    ("deepseek_r1", "deepseek", "Hm.\n</think>\n\n", "Hm.", "<think>\n"),
    ("deepseek_v31", "deepseek31", "Hm.</think>", "Hm.", "<think>"),
    ("kimi_thinking", "kimik2", "Hm.</think>", "Hm.", "<think>"),
    ("glm45", "glm45_moe", "\n<think>Hm.</think>\n", "Hm.", "<|assistant|>"),
]


@pytest.mark.parametrize(("reasoning", "tools", "before", "thought", "prompt"), PAIRS)
async def test_reasoning_and_calls_together(reasoning: str, tools: str, before: str, thought: str, prompt: str):
    """The calls of a format's own samples behind reasoning."""
    samples = [one for one in tool_examples()[tools] if one.calls and not one.content]
    assert samples
    engine = ScriptedClient(prompt=prompt)
    async with (
        running(engine, tool_call_parser=tools, reasoning_parser=reasoning) as server,
        official(server.url) as client,
    ):
        for example in samples:
            engine.reply, engine.ending = before + example.text, example.finish_reason
            (one,) = await whole(client, tools=tools_of(example))
            assert (one.reasoning.strip(), one.content.strip()) == (thought, "")
            assert [name for _, name, _ in one.calls] == [name for name, _ in example.calls]
            parts = await streamed(client, tools=tools_of(example))
            assert without_ids(parts[0]) == without_ids(one)


@pytest.mark.parametrize("parser", ["auto", "base"])
async def test_harmony_by_token_id(parser: str):
    """Reasoning, preamble, call. Chosen by architecture, also under the `base` of the public recipe."""
    text = (
        "<|channel|>analysis<|message|>Look <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "ü"}<|call|>'
    )
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    engine = ScriptedClient(text, prompt, architecture="GptOssForCausalLM")
    async with running(engine, reasoning_parser=parser) as server, official(server.url) as client:
        tools = [{"type": "function", "function": {"name": "f"}}]
        (one,) = await whole(client, tools=tools)
        assert (one.reasoning, one.content, one.finish_reason) == ("Look ", "I look.", "tool_calls")
        assert [(name, json.loads(arguments)) for _, name, arguments in one.calls] == [("f", {"a": "ü"})]
        assert without_ids((await streamed(client, tools=tools))[0]) == without_ids(one)
        # With a stop string the parser reads the text that the client has cut.
        (cut,) = await whole(client, tools=tools, stop="look.")
        assert (cut.reasoning, cut.content, cut.finish_reason) == ("Look ", "I ", "stop")
