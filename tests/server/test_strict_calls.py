"""`strict: true` where the model decides about calls: a real engine, real HTTP, the official client. The model's own
calls break their schemas; the grammar mends them, and leaves its other texts as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_streams import Message, of_choice, of_chunks
from copying_model import Script, write_copying
from test_scripted_model import served

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object", "properties": {"n": {"enum": ["a2"]}}, "required": ["n"], "additionalProperties": False
}  # fmt: skip
TEXT = 'No {"name": "f"}, [f(n=1)] or <f>.'
# "1" is a token of its own everywhere, and only "2" can take its place: the copying model stays in step.
CALLS = {
    "llama": '<|python_tag|>{"name": "f", "parameters": {"n": "a1"}}',
    "json": '{"name": "f", "parameters": {"n": "a1"}}',
    "pythonic": "[f(n='a1')]",
    "deepseek32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="true">a1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="string"'
    "<|sep|>a1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
}
PROMPTS = {"kimi_k3": "<|open|>response<|sep|>"}


async def both(client: openai.AsyncOpenAI, script: str, strict: bool) -> Message:
    """An answer, whole and streamed the same."""
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": strict}}]
    fields: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": script}], "temperature": 0, "max_tokens": 200,
        "tools": tools,
    }  # fmt: skip
    answer = await client.chat.completions.create(**fields)
    (choice,) = (of_choice(each) for each in answer.model_dump(exclude_unset=True)["choices"])
    stream = await client.chat.completions.create(**fields, stream=True)
    streamed = of_chunks([chunk.model_dump(exclude_unset=True) async for chunk in stream])[0]
    for one in (choice, streamed):
        one.calls = [("", name, arguments) for _, name, arguments in one.calls]
    assert streamed == choice
    return choice


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_is_mended_and_text_is_not(tmp_path: Path, name: str):
    """The bug: in these formats `strict` had no effect with tool_choice auto."""
    reply, prompt = CALLS[name], PROMPTS.get(name, "<|im_start|>assistant\n")
    write_copying(tmp_path, {"call": Script(reply, prompt), "text": Script(TEXT, prompt)})
    async with served(tmp_path, "kimi_k3" if name == "kimi_k3" else "passthrough", name) as clients:
        for strict in (False, True):
            called = await both(clients.chat, "call", strict)
            ((_, function, arguments),) = called.calls
            assert (function, json.loads(arguments), called.content) == ("f", {"n": "a2" if strict else "a1"}, "")
            assert called.finish_reason == "tool_calls"
            said = await both(clients.chat, "text", strict)
            assert (said.content, said.calls, said.finish_reason) == (TEXT, [], "stop")
