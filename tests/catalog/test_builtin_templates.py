"""Chat templates that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tokenspeed.catalog.chat_templates import builtin_chat_templates
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.text.parsers.interface import ParseContext, parse_all
from tokenspeed.text.parsers.select import select_tools

USER = {"role": "user", "content": "q"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F."}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    USER,
    {"role": "assistant", "content": "c", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "1"},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
]


@dataclass(frozen=True)
class Model:
    architecture: str = "LlamaForCausalLM"


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": builtin_chat_templates()[name]}, special_tokens={}, spellings=())


def test_every_template_renders_a_plain_chat() -> None:
    assert set(builtin_chat_templates()) == {"chatml", "chatml-tools"}
    for name in builtin_chat_templates():
        assert template(name).render([USER]).text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        assert template(name).render([TURNS[0], USER], add_generation_prompt=False).text == (
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        )


def test_chatml_refuses_tools() -> None:
    for messages, tools in (([USER], TOOLS), (TURNS, None)):
        with pytest.raises(InvalidRequest, match="use chatml-tools"):
            template("chatml").render(messages, tools=tools)


def test_tools_calls_and_results() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
    text = template("chatml-tools").render(TURNS, tools=TOOLS).text
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\ns\n\n") and '<tools>\n{"type": "function", "function"' in head
    assert rest == (
        "<|im_start|>user\nq<|im_end|>\n"
        f"<|im_start|>assistant\nc\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_its_calls_are_read_by_the_parser_that_auto_takes() -> None:
    chosen = select_tools("auto", Model(), builtin_chat_templates()["chatml-tools"])
    assert chosen.format.names[0] == "qwen"
    written = template("chatml-tools").render(TURNS[:3], add_generation_prompt=False).text.rpartition("assistant\n")[2]
    parsed = parse_all(chosen.format.make(ParseContext()), written.removesuffix("<|im_end|>\n"))
    assert parsed.content == "c" and [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"a": "ü"}')] * 2
