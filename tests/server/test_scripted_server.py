"""`tokenspeed serve` as a process on a scripted checkpoint: reasoning, text and a call with their usage, in three APIs
through the official SDKs, and an agent's turn behind the call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from copying_model import PROMPT_TOKENS, Script, write_copying

pytestmark = pytest.mark.timeout(300)

THOUGHT, SAID, ARGUMENTS, ANSWER = "Hm, ü 🏔.", "Let me look.", {"city": "Zürich 🏔"}, "It is cold, -3 °C."
REASONED = f"<think>\n{THOUGHT}\n</think>"
CALLED = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
SCRIPTS = {
    "ask": Script(f"{REASONED}\n\n{SAID}\n<tool_call>\n{CALLED}\n</tool_call>"),
    "-3": Script(f"{REASONED}\n\n{ANSWER}"),
}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
CUSTOM_TOOLS: Any = [{"name": "weather", "input_schema": SCHEMA}]
ASK: Any = [{"role": "user", "content": "ask"}]


@dataclass(frozen=True)
class Server:
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    num_output: int
    num_reasoning: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    tokenizer = write_copying(folder, SCRIPTS)
    num_output, num_reasoning = (len(tokenizer.encode(text).ids) for text in (SCRIPTS["ask"].text, REASONED))
    command = [sys.executable, "-m", "tokenspeed", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    command += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen", "--device", "cpu", "--dtype", "float32"]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--num-threads", "1", "--max-total-tokens", "4096"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline_s = time.monotonic() + 200
        while (found := re.search(r"tokenspeed ready on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.05)
        with (
            openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as one,
            anthropic.Anthropic(base_url=found[1], api_key="none", max_retries=0) as other,
        ):
            yield Server(one, other, num_output + 1, num_reasoning)
    finally:
        process.kill()
        process.wait(30)


class Usage(NamedTuple):
    num_prompt: int
    num_cached: int
    num_output: int
    num_reasoning: int


def of_chat(completion: Any) -> Usage:
    used = completion.usage
    return Usage(
        used.prompt_tokens,
        used.prompt_tokens_details.cached_tokens,
        used.completion_tokens,
        used.completion_tokens_details.reasoning_tokens,
    )


def of_response(response: Any) -> Usage:
    used = response.usage
    return Usage(
        used.input_tokens,
        used.input_tokens_details.cached_tokens,
        used.output_tokens,
        used.output_tokens_details.reasoning_tokens,
    )


def of_message(message: Any) -> Usage:
    used = message.usage
    return Usage(
        used.input_tokens + used.cache_read_input_tokens,
        used.cache_read_input_tokens,
        used.output_tokens,
        used.output_tokens_details.thinking_tokens,
    )


def check_usage(server: Server, usage: Usage) -> None:
    """Tokens that come together where the reasoning ends all count as reasoning, so there is no exact number."""
    assert usage.num_prompt == PROMPT_TOKENS and PROMPT_TOKENS // 2 < usage.num_cached < PROMPT_TOKENS
    assert usage.num_output == server.num_output
    assert server.num_reasoning <= usage.num_reasoning <= server.num_output


def check_chat(message: Any) -> None:
    assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)


def check_response(response: Any) -> None:
    reasoning, text, call = response.output
    assert (reasoning.content[0].text, response.output_text, text.type) == (THOUGHT, SAID, "message")
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    assert response.status == "completed"


def check_message(message: Any) -> None:
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == (THOUGHT, SAID)
    assert (call.name, call.input, message.stop_reason) == ("weather", ARGUMENTS, "tool_use")


def test_chat(server: Server):
    fields: dict[str, Any] = {"model": "tiny", "tools": CHAT_TOOLS, "temperature": 0}
    first = server.openai.chat.completions.create(messages=ASK, **fields)
    whole = server.openai.chat.completions.create(messages=ASK, **fields)
    for completion in (first, whole):
        assert completion.choices[0].finish_reason == "tool_calls"
        check_chat(completion.choices[0].message)
    assert of_chat(first).num_output == server.num_output
    check_usage(server, of_chat(whole))

    with server.openai.chat.completions.stream(
        messages=ASK, stream_options={"include_usage": True}, **fields
    ) as stream:
        streamed = stream.until_done().get_final_completion()
    check_chat(streamed.choices[0].message)
    check_usage(server, of_chat(streamed))

    call: Any = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "-3"}
    behind = server.openai.chat.completions.create(messages=[*ASK, call, result], **fields)
    assert (behind.choices[0].message.content, behind.choices[0].finish_reason) == (ANSWER, "stop")


def test_responses(server: Server):
    fields: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0}
    server.openai.responses.create(input="ask", **fields)  # the prompt is cached from here on
    whole = server.openai.responses.create(input="ask", **fields)
    check_response(whole)
    check_usage(server, of_response(whole))

    with server.openai.responses.stream(input="ask", **fields) as stream:
        streamed = stream.until_done().get_final_response()
    check_response(streamed)
    check_usage(server, of_response(streamed))

    result: Any = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": "-3"}
    behind = server.openai.responses.create(previous_response_id=whole.id, input=[result], **fields)
    assert (behind.output_text, behind.status) == (ANSWER, "completed")


def test_messages(server: Server):
    fields: dict[str, Any] = {"model": "tiny", "tools": CUSTOM_TOOLS, "max_tokens": 200}
    server.anthropic.messages.create(messages=ASK, **fields)  # the prompt is cached from here on
    whole = server.anthropic.messages.create(messages=ASK, **fields)
    check_message(whole)
    check_usage(server, of_message(whole))

    with server.anthropic.messages.stream(messages=ASK, **fields) as stream:
        streamed = stream.get_final_message()
    check_message(streamed)
    check_usage(server, of_message(streamed))

    call: Any = whole.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "-3"}
    talk: Any = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    behind = server.anthropic.messages.create(messages=talk, **fields)
    assert [block.type for block in behind.content] == ["thinking", "text"]
    assert (behind.content[-1].text, behind.stop_reason) == (ANSWER, "end_turn")
