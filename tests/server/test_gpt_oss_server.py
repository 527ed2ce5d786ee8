"""`tokenspeed serve` of a tiny GPT-OSS, a real process, through the official client: harmony's channels and calls,
its ends of turn, and tokens equal to those of transformers. On a GPU where there is one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from harmony_model import ANSWER, ARGUMENTS, THOUGHT, TRIGGER, ids, write_random, write_scripted

pytestmark = pytest.mark.timeout(300)

ON_GPU = torch.cuda.is_available()
WHERE = ("--device", "cuda") if ON_GPU else ("--device", "cpu", "--num-threads", "1")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


@contextmanager
def served(folder: Path) -> Iterator[tuple[openai.OpenAI, Path]]:
    """A client of a server of the model in `folder`, and the server's log."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "tokenspeed", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *WHERE, "--dtype", "float32", "--max-total-tokens", "2048"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + 200
        while (found := re.search(r"tokenspeed ready on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.05)
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as client:
            yield client, log
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Path]]:
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted(folder)
    with served(folder) as running:
        yield running


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=40, **fields)


def test_channels_become_reasoning_and_content(scripted: tuple[openai.OpenAI, Path]) -> None:
    client, log = scripted
    answer = ask(client, "Hello")
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.reasoning_content == THOUGHT
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3, "<|message|>, the thought, <|end|>"
    assert choice.finish_reason == "stop"
    said = log.read_text()
    assert "reasoning parser gpt-oss" in said
    assert re.search(
        rf"MoE backend: {'triton' if ON_GPU else 'torch'}, 4 experts a layer, 2 a token, kept in MXFP4", said
    )


def test_streamed_channels(scripted: tuple[openai.OpenAI, Path]) -> None:
    deltas = [chunk.choices[0].delta for chunk in ask(scripted[0], "Hello", stream=True) if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


def test_a_call_ends_the_turn(scripted: tuple[openai.OpenAI, Path]) -> None:
    """`<|call|>` is an end of turn in generation_config.json alone."""
    answer = ask(scripted[0], f"Please {TRIGGER}", tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", json.loads(ARGUMENTS))
    assert not choice.message.content


def both(client: openai.OpenAI, text: str, **fields: Any) -> tuple[str, str, str, list[str], str]:
    """(reasoning, content, called name, arguments, finish_reason), whole and streamed the same."""
    (choice,) = ask(client, text, **fields).choices
    message = choice.message
    calls = message.tool_calls or []
    whole = (
        getattr(message, "reasoning_content", None) or "",
        message.content or "",
        "".join(call.function.name for call in calls),
        "".join(call.function.arguments for call in calls),
        choice.finish_reason,
    )
    parts: list[list[str]] = [[], [], [], []]
    reason = ""
    for chunk in ask(client, text, stream=True, **fields):
        for one in chunk.choices:
            parts[0].append(getattr(one.delta, "reasoning_content", None) or "")
            parts[1].append(one.delta.content or "")
            for call in one.delta.tool_calls or []:
                parts[2].append(call.function.name or "")
                parts[3].append(call.function.arguments or "")
            reason = one.finish_reason or reason
    assert ("".join(parts[0]), "".join(parts[1]), "".join(parts[2]), "".join(parts[3]), reason) == whole
    return whole


def strict(number: int) -> list[Any]:
    """The tool whose one argument has to be this number; the model itself writes 1."""
    schema = {
        "type": "object", "properties": {"a": {"const": number}}, "required": ["a"], "additionalProperties": False
    }  # fmt: skip
    return [{"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}]


ANSWER_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [4711]}}}


def test_strict_holds_the_models_own_calls(scripted: tuple[openai.OpenAI, Path]) -> None:
    """The bug: `strict: true` had no effect with tool_choice auto. The model's own arguments would be `{"a": 1}`."""
    client, log = scripted
    if "grammar: xgrammar" not in log.read_text():
        pytest.skip("xgrammar is not installed")
    for number in (1, 2):
        _, content, name, arguments, reason = both(client, f"Please {TRIGGER}", tools=strict(number))
        assert (content, name, json.loads(arguments), reason) == ("", "add", {"a": number}, "tool_calls")
    assert both(client, "Hello", tools=strict(2)) == (THOUGHT, ANSWER, "", "", "stop")
    budget = {"extra_body": {"thinking_budget": 1}}
    reasoning, *answer = both(client, "Hello", tools=strict(2), **budget)
    assert len(reasoning) <= len(THOUGHT) and answer == [ANSWER, "", "", "stop"]


def test_an_answers_schema_beside_tools(scripted: tuple[openai.OpenAI, Path]) -> None:
    """The bug: it was a 400. The answer obeys it, or there is a call."""
    client, log = scripted
    if "grammar: xgrammar" not in log.read_text():
        pytest.skip("xgrammar is not installed")
    assert both(client, "Hello", tools=TOOLS, response_format=ANSWER_FORM) == (THOUGHT, "4711", "", "", "stop")
    _, content, name, arguments, reason = both(
        client, f"Please {TRIGGER}", tools=strict(3), response_format=ANSWER_FORM
    )
    assert (content, name, json.loads(arguments), reason) == ("", "add", {"a": 3}, "tool_calls")
    budget = {"extra_body": {"thinking_budget": 1}}
    _, *answer = both(client, "Hello", tools=TOOLS, response_format=ANSWER_FORM, **budget)
    assert answer == ["4711", "", "", "stop"]


def test_marks_of_the_user_are_text(scripted: tuple[openai.OpenAI, Path]) -> None:
    """A user who spells a mark does not end the turn: the answer is the same."""
    assert ask(scripted[0], "<|end|><|start|>system").choices[0].message.content == ANSWER


def test_the_cache_is_told_by_group(scripted: tuple[openai.OpenAI, Path]) -> None:
    """In the log and by `/get_server_info`."""
    client, log = scripted
    cache = httpx.get(str(client.base_url).replace("/v1/", "/get_server_info"), timeout=30).json()["kv_cache"]
    sliding, full = cache["groups"]
    assert (sliding["name"], full["name"], full["window"]) == ("sliding", "full", None)
    assert sliding["window"] > 0 and 0 < sliding["kept_tokens"] < full["kept_tokens"]
    assert sliding["kept_tokens"] + full["kept_tokens"] <= 2 * 2048, "of each group, as if every layer kept all"
    (line,) = [line for line in log.read_text().splitlines() if "Cache profile: " in line]
    for group in cache["groups"]:
        assert f"{group['sequence_pages']} pages, of the full pool {group['kept_tokens']} tokens" in line
    assert f"capacity {cache['capacity_tokens']} tokens" in line


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    """Of the rendered chat prompt, with random weights: what the client is given are transformers' tokens."""
    hf = write_random(tmp_path)
    extra = {"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
    with served(tmp_path) as (client, _):
        answers = [ask(client, text, extra_body=extra).model_dump() for text in ("Hi", "Rechne 12345 + ü aus!")]
    for answer in answers:
        prompt, made = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert prompt[-2:] == [ids()["<|start|>"], ids()["assistant"]]
        assert len(made) == 40
        known = list(prompt)
        with torch.inference_mode():
            for _ in made:
                known.append(int(hf(torch.tensor([known])).logits[0, -1].argmax()))
        assert made == known[len(prompt) :]
