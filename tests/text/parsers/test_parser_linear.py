"""Work grows with the text, not with its square: counted in characters looked at, never in seconds."""

from __future__ import annotations

import pytest

from tokenspeed.text.parsers.interface import ParseContext, ToolSpec, assemble
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats

CHARS = 10_000
# A character is looked at again only while it may begin a marker or is part of a call's header; both are bounded.
MOST_LOOKS = 128
MOST_HELD = 1100

BODY = "lorem <ip> sum{ "
TOOLS = (ToolSpec("f", {"properties": {"a": {"type": "string"}, "n": {"type": "array"}}}),)

# {} is the argument's text.
CALLS = {
    "qwen": '<tool_call>\n{{"name": "f", "arguments": {{"a": "{}"}}}}\n</tool_call>',
    "json": '{{"name": "f", "arguments": {{"a": "{}"}}}}',
    "llama": '<|python_tag|>{{"name": "f", "parameters": {{"a": "{}"}}}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{{"a": "{}"}}',
    "kimik2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"a": "{}"}}<|tool_call_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="a" type="string"<|sep|>{}'
    "<|close|>argument<|sep|><|close|>call<|sep|>",
    "deepseek": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{"a": "{}"}}\n```<｜tool▁call▁end｜>',
    "deepseek31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"a": "{}"}}<｜tool▁call▁end｜>',
    "deepseek32": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">{}</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    "glm45_moe": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "pythonic": '[f(a="{}")]',
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": "{}"}}<|call|>',
}


def walk(make, text: str):
    """Feed `text` by characters; gives (result, work a character, most characters held)."""
    parser = make(ParseContext(tools=TOOLS))
    deltas, held = [], 0
    for char in text:
        deltas += parser.feed(char)
        held = max(held, parser.cursor.held)
    deltas += parser.flush("stop")
    assert not parser.incomplete
    return assemble(deltas), deltas, parser.cursor.work / max(1, len(text)), held


def test_every_format_is_covered():
    assert set(CALLS) == {one.names[0] for one in tool_formats().values()} - {"passthrough"}


@pytest.mark.parametrize("name", CALLS)
def test_long_argument_by_characters(name: str):
    body = BODY * (CHARS // len(BODY))
    parsed, deltas, looks, held = walk(tool_formats()[name].make, CALLS[name].format(body))
    assert body in parsed.calls[0].arguments
    assert parsed.content == ""
    assert looks <= MOST_LOOKS
    assert held <= MOST_HELD
    assert len(deltas) > CHARS // 2, "the argument is given as it comes"


def test_200_kb_argument_by_characters():
    body = "x" * 200_000
    parsed, _, looks, held = walk(tool_formats()["qwen"].make, CALLS["qwen"].format(body))
    assert len(parsed.calls[0].arguments) > len(body)
    assert looks <= 2
    assert held <= 64


def test_long_argument_that_is_kept_for_its_type():
    numbers = "[" + "1, " * 5000 + "1]"
    text = f"<tool_call>\n<function=f>\n<parameter=n>\n{numbers}\n</parameter>\n</function>\n</tool_call>"
    parsed, _, looks, _ = walk(tool_formats()["qwen_coder"].make, text)
    assert parsed.calls[0].arguments == f'{{"n": {numbers}}}'
    assert looks <= 2


UNITS = ("word ", " \n", "<", "{", "[", "<tool_call>", "<|tool_call_begin|>", "[TOOL_CALLS]", "<|open|>", "<|channel|>")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", [*CALLS, "base", "deepseek_r1"])
def test_long_text_without_calls(name: str, unit: str):
    text = unit * (2000 // len(unit))
    make = tool_formats()[name].make if name in CALLS else reasoning_formats()[name].make
    parsed, _, looks, held = walk(make, text)
    assert parsed.calls == ()
    assert len(parsed.content + parsed.reasoning) >= len(text) - text.count("\n") - 120
    assert looks <= MOST_LOOKS
    assert held <= MOST_HELD


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", CALLS)
def test_long_text_without_calls_in_one_piece(name: str, unit: str):
    text = unit * (100_000 // len(unit))
    parser = tool_formats()[name].make(ParseContext(tools=TOOLS))
    parser.feed(text)
    parser.flush("stop")
    assert parser.cursor.work <= MOST_LOOKS * len(text)
