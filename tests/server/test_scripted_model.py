"""Every parser's samples as the tokens of a real model: real engine, real HTTP, both official SDKs, whole and streamed.

What is right is what the same parsers say of the text in one piece; tests/text/parsers holds that to the samples.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from chat_streams import Message, of_choice, of_chunks
from copying_model import Script, write_copying
from fake_server import running
from tokenizers import Tokenizer

from tokenspeed.config.args import EngineArgs
from tokenspeed.engine.connect import start_local_engine
from tokenspeed.engine.llm import configure
from tokenspeed.runner.build import build_runner
from tokenspeed.text.parsers.interface import Example, ParseContext, ToolCallAbandoned, ToolSpec, assemble
from tokenspeed.text.parsers.pipeline import build_pipeline
from tokenspeed.text.parsers.registry import reasoning_examples, reasoning_formats, tool_examples, tool_formats

pytestmark = pytest.mark.timeout(300)

ENGINE = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 32, "max_total_tokens": 32_768}
PLAIN = "passthrough"
PAIRS = [(PLAIN, name) for name in sorted(tool_examples())]
PAIRS += [(name, PLAIN) for name in sorted(reasoning_examples()) if name != PLAIN]
TOGETHER = {
    ("qwen3", "qwen"): ("<think>\nHm, ü.\n</think>\n\n", "<|im_start|>assistant\n"),
    ("qwen3_thinking", "qwen_coder"): ("Hm, ü.\n</think>\n\n", "assistant\n<think>\n"),
    ("deepseek_r1", "deepseek"): ("Hm, ü.\n</think>\n\n", "<think>\n"),
    ("deepseek_v31", "deepseek32"): ("Hm, ü.</think>", "<think>"),
    ("kimi_thinking", "kimik2"): ("Hm, ü.</think>", "<think>"),
    ("glm45", "glm45_moe"): ("\n<think>Hm, ü.</think>\n", "<|assistant|>"),
    ("gpt-oss", "gpt-oss"): ("", "<|start|>user<|message|>Hi<|end|><|start|>assistant"),
    ("kimi_k3", "kimi_k3"): ("", '<|open|>message role="assistant"<|sep|>'),
}
"""Formats of one model: the reasoning before a sample with calls, and the prompt's end."""


def samples(reasoning: str, tools: str) -> dict[str, Example]:
    if (reasoning, tools) in TOGETHER:
        before, prompt = TOGETHER[reasoning, tools]
        calling = [one for one in tool_examples()[tools] if one.calls and one.prompt is None]
        found = [replace(one, text=before + one.text, prompt=prompt) for one in calling]
    else:
        found = list(tool_examples()[tools] if reasoning == PLAIN else reasoning_examples()[reasoning])
    assert found
    return {f"sample {index}": example for index, example in enumerate(found)}


def script_of(example: Example) -> Script:
    return Script(example.text) if example.prompt is None else Script(example.text, example.prompt)


@dataclass(frozen=True)
class Clients:
    chat: openai.AsyncOpenAI
    messages: anthropic.AsyncAnthropic


@asynccontextmanager
async def served(folder: Path, reasoning: str, tools: str) -> AsyncIterator[Clients]:
    """The model behind a server of this process, its engine on a thread."""
    engine = await start_local_engine(configure(EngineArgs(model=str(folder), **ENGINE)), build_runner)
    # Reading certificates takes a third of a second a client.
    try:
        async with (
            running(engine, reasoning_parser=reasoning, tool_call_parser=tools) as server,
            openai.DefaultAsyncHttpxClient(verify=False) as one,
            anthropic.DefaultAsyncHttpxClient(verify=False) as other,
        ):
            yield Clients(
                openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=one),
                anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, http_client=other),
            )
    finally:
        await engine.close()


def offered(example: Example) -> tuple[ToolSpec, ...]:
    """The sample's tools, or those that it calls; never none, since calls are read only where there are tools."""
    if example.tools is not None:
        return example.tools
    return tuple(ToolSpec(name) for name in dict(example.calls)) or (ToolSpec("another"),)


def in_one_piece(reasoning: str, tools: str, example: Example) -> tuple[Message, set[int]]:
    """What chat has to answer, ids left out; and which of its calls the parser abandoned."""
    context = ParseContext(tools=offered(example), prompt=script_of(example).prompt)
    parser = build_pipeline(reasoning_formats()[reasoning], tool_formats()[tools], context)
    deltas = [*parser.feed(example.text, ()), *parser.flush(example.finish_reason)]
    parsed = assemble(deltas)
    calls = [("", call.name, call.arguments) for call in parsed.calls]
    right = Message(parsed.reasoning, parsed.content, calls, parser.finish_reason(example.finish_reason))
    return right, {delta.index for delta in deltas if isinstance(delta, ToolCallAbandoned)}


def without_ids(message: Message) -> Message:
    assert all(identity for identity, _, _ in message.calls)
    calls = [("", name, arguments) for _, name, arguments in message.calls]
    return Message(message.reasoning, message.content, calls, message.finish_reason)


def max_tokens(tokenizer: Tokenizer, example: Example) -> int:
    """Room for the text, and for the end unless the sample was cut."""
    num_tokens = len(tokenizer.encode(example.text, add_special_tokens=False).ids)
    return num_tokens + (example.finish_reason == "stop")


async def check_chat(client: openai.AsyncOpenAI, name: str, example: Example, room: int, right: Message) -> None:
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}}
        for tool in offered(example)
    ]
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": name}], "temperature": 0, "max_tokens": room}
    answer = await client.chat.completions.create(model="tiny", tools=tools, **fields)
    (choice,) = answer.model_dump(exclude_unset=True)["choices"]
    assert without_ids(of_choice(choice)) == right
    assert answer.usage and answer.usage.completion_tokens == room
    stream = await client.chat.completions.create(model="tiny", tools=tools, stream=True, **fields)
    chunks = of_chunks([chunk.model_dump(exclude_unset=True) async for chunk in stream])
    assert without_ids(chunks[0]) == right


def cuts(tokenizer: Tokenizer, example: Example) -> list[tuple[int, Example]]:
    """The sample cut by the limit, with the limit: behind two thirds of it, and before nothing but its end."""
    ids = tokenizer.encode(example.text, add_special_tokens=False).ids
    texts = {room: tokenizer.decode(ids[:room], skip_special_tokens=False) for room in (len(ids) * 2 // 3, len(ids))}
    return [
        (room, replace(example, text=text, finish_reason="length"))
        for room, text in texts.items()
        if text and "\ufffd" not in text
    ]


ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def check_text(message: anthropic.types.Message, right: Message) -> None:
    seen = Message()
    for block in message.content:
        if block.type == "thinking":
            seen.reasoning += block.thinking
        elif block.type == "text":
            seen.content += block.text
    assert (seen.reasoning, seen.content) == (right.reasoning, right.content)
    no_call = right.finish_reason == "tool_calls" and not any(is_object(arguments) for _, _, arguments in right.calls)
    assert message.stop_reason == ("end_turn" if no_call else ENDS[str(right.finish_reason)])


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def check_whole(message: anthropic.types.Message, right: Message, abandoned: set[int]) -> None:
    """A call that the parser abandoned has no block, nor has one without an object as input."""
    check_text(message, right)
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    told = [call for place, call in enumerate(right.calls) if place not in abandoned]
    assert calls == [(name, json.loads(arguments)) for _, name, arguments in told if is_object(arguments)]


async def check_streamed(stream: anthropic.lib.streaming.AsyncMessageStream[None], right: Message) -> None:
    """A call's input comes as written, also where its end never comes."""
    calls: list[tuple[str, str]] = []
    async for event in stream:
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            calls.append((event.content_block.name, ""))
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            name, before = calls.pop()
            calls.append((name, before + event.delta.partial_json))
    check_text(await stream.get_final_message(), right)
    assert calls == [(name, arguments) for _, name, arguments in right.calls]


async def check_messages(
    client: anthropic.AsyncAnthropic, name: str, example: Example, room: int, right: Message, abandoned: set[int]
) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": room,
        "messages": [{"role": "user", "content": name}],
        "tools": [
            {"name": tool.name, "input_schema": dict(tool.parameters) or {"type": "object"}}
            for tool in offered(example)
        ],
        "extra_body": {"temperature": 0},
    }
    check_whole(await client.messages.create(**fields), right, abandoned)
    async with client.messages.stream(**fields) as stream:
        await check_streamed(stream, right)


def check_items(response: openai.types.responses.Response, right: Message, abandoned: set[int]) -> None:
    """Every item is completed, but the last one of an answer that was cut, and a call that is none or was abandoned."""
    seen = Message()
    for place, item in enumerate(response.output):
        whole = right.finish_reason != "length" or place + 1 < len(response.output)
        if item.type == "reasoning":
            assert item.content is not None and item.summary == []
            seen.reasoning += "".join(part.text for part in item.content)
        elif item.type == "message":
            assert all(part.type == "output_text" for part in item.content)
            seen.content += "".join(part.text for part in item.content if part.type == "output_text")
        else:
            assert item.type == "function_call" and item.call_id
            whole = whole and is_object(item.arguments) and len(seen.calls) not in abandoned
            seen.calls.append(("", item.name, item.arguments))
        assert item.status == ("completed" if whole else "incomplete")
    assert (seen.reasoning, seen.content, seen.calls) == (right.reasoning, right.content, right.calls)
    was_cut = right.finish_reason == "length"
    assert response.status == ("incomplete" if was_cut else "completed")
    reason = response.incomplete_details and response.incomplete_details.reason
    assert reason == ("max_output_tokens" if was_cut else None)


def bare(output: list[Any]) -> list[dict[str, Any]]:
    """Items without their ids."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_unset=True) for item in output]


DELTAS = ("response.reasoning_text.delta", "response.output_text.delta", "response.function_call_arguments.delta")


async def check_typed(stream: openai.AsyncStream[Any], right: Message) -> openai.types.responses.Response:
    """Numbered without a gap; an item's deltas are its text; done items are those of the last event's response."""
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == ("response.incomplete" if right.finish_reason == "length" else "response.completed")
    response: openai.types.responses.Response = last.response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in response.output]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in response.output]
    for place, item in enumerate(response.output):
        mine = [event for event in events if event.type in DELTAS and event.output_index == place]
        assert all(event.item_id == item.id and event.delta for event in mine)
        text = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        assert "".join(event.delta for event in mine) == text
    return response


async def check_responses(
    client: openai.AsyncOpenAI, name: str, example: Example, room: int, right: Message, abandoned: set[int]
) -> None:
    """Whole, streamed, and once more behind it, for the model says the same to the same name."""
    tools = [
        {"type": "function", "name": tool.name, "parameters": dict(tool.parameters), "strict": False}
        for tool in offered(example)
    ]
    fields: dict[str, Any] = {"model": "tiny", "input": name, "temperature": 0, "max_output_tokens": room}
    whole = await client.responses.create(tools=tools, **fields)
    check_items(whole, right, abandoned)
    assert whole.usage and whole.usage.output_tokens == room
    typed = await check_typed(await client.responses.create(tools=tools, stream=True, **fields), right)
    check_items(typed, right, abandoned)
    assert bare(typed.output) == bare(whole.output)
    again = await client.responses.create(tools=tools, previous_response_id=typed.id, **fields)
    check_items(again, right, abandoned)
    assert again.previous_response_id == typed.id and bare(again.output) == bare(whole.output)
    before = await client.responses.input_items.list(again.id, order="asc", limit=100)
    assert [item.type for item in before.data] == ["message", *(item.type for item in whole.output), "message"]
    kept = [item.id for item in before.data[1:-1]]
    assert kept == [item.id for item in typed.output]


@pytest.mark.parametrize(("reasoning", "tools"), [*PAIRS, *TOGETHER])
async def test_samples(tmp_path: Path, reasoning: str, tools: str):
    said = samples(reasoning, tools)
    tokenizer = write_copying(tmp_path, {name: script_of(example) for name, example in said.items()})
    async with served(tmp_path, reasoning, tools) as clients, asyncio.TaskGroup() as group:
        for name, example in said.items():
            room = max_tokens(tokenizer, example)
            right, abandoned = in_one_piece(reasoning, tools, example)
            group.create_task(check_chat(clients.chat, name, example, room, right))
            group.create_task(check_messages(clients.messages, name, example, room, right, abandoned))
            group.create_task(check_responses(clients.chat, name, example, room, right, abandoned))
        name, example = next(((name, one) for name, one in said.items() if one.calls), next(iter(said.items())))
        for room, cut in cuts(tokenizer, example):
            right, abandoned = in_one_piece(reasoning, tools, cut)
            group.create_task(check_responses(clients.chat, name, cut, room, right, abandoned))
