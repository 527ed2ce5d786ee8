"""Every format of the room, found as the server finds it: its own samples, and the law of splits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser_laws import assert_example, assert_law, context_of, cut, merged, spoiled, stream

from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Example,
    ParseContext,
    Parser,
    ToolSpec,
    assemble,
    parse_all,
)
from tokenspeed.text.parsers.registry import reasoning_examples, reasoning_formats, tool_examples, tool_formats

Make = Callable[[ParseContext], Parser]

FORMATS: dict[str, tuple[Make, tuple[Example, ...]]] = {
    **{f"reasoning/{n}": (reasoning_formats()[n].make, examples) for n, examples in reasoning_examples().items()},
    **{f"tools/{n}": (tool_formats()[n].make, examples) for n, examples in tool_examples().items()},
}
EXAMPLES = [
    pytest.param(make, example, id=f"{name}-{index}")
    for name, (make, examples) in FORMATS.items()
    for index, example in enumerate(examples)
]


@pytest.mark.parametrize(("make", "example"), EXAMPLES)
def test_example_is_parsed(make: Make, example: Example):
    parser = make(context_of(example))
    parsed = parse_all(parser, example.text, example.finish_reason)
    assert_example(parsed, parser.incomplete, example)


@pytest.mark.parametrize(("make", "example"), EXAMPLES)
def test_example_split_anywhere_gives_the_same(make: Make, example: Example):
    text = example.text
    for pieces in (list(text), *(cut(text, [at]) for at in range(len(text)))):
        assert_law(lambda: make(context_of(example)), text, pieces, example.finish_reason)


@pytest.mark.parametrize(("make", "example"), EXAMPLES)
def test_every_beginning_of_an_example_obeys_the_law(make: Make, example: Example):
    for end in range(len(example.text)):
        text = example.text[:end]
        assert_law(lambda: make(context_of(example)), text, list(text), "length")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_spoiled_samples_obey_the_law(name: str, data: st.DataObject):
    make, examples = FORMATS[name]
    example, text, pieces, finish_reason = data.draw(spoiled(examples))
    assert_law(lambda: make(context_of(example)), text, pieces, finish_reason)


# Formats that have marks of their own around calls; those are no text, wherever they stand.
SECTION_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
DSML_MARKS = tuple(f"<{s}｜DSML｜{word}>" for word in ("function_calls", "tool_calls") for s in ("", "/"))
OF_CHANNELS = ("gpt-oss", "kimi_k3")


def without_marks(text: str) -> str:
    """Without section marks and white space. What is left around a mark may form another."""
    shorter = text
    for mark in (*SECTION_MARKS, *DSML_MARKS):
        shorter = shorter.replace(mark, "")
    return "".join(text.split()) if shorter == text else without_marks(shorter)


@pytest.mark.parametrize("name", [name for name in tool_examples() if name not in OF_CHANNELS])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_without_tools_on_offer_all_text_is_content(name: str, data: st.DataObject):
    _, text, pieces, finish_reason = data.draw(spoiled(tool_examples()[name]))
    deltas = stream(tool_formats()[name].make(ParseContext(tools=())), pieces, finish_reason)
    assert all(isinstance(delta, ContentDelta) for delta in deltas)
    content = assemble(deltas).content
    if name in ("kimik2", "deepseek", "deepseek31", "deepseek32"):
        text, content = without_marks(text), without_marks(content)
    assert content == text


@pytest.mark.parametrize(("make", "example"), EXAMPLES)
def test_cut_call_is_never_whole(make: Make, example: Example):
    """A call that the length limit cut is said to be incomplete, and no closing is invented: what was given of it is
    the beginning of what the whole output gives."""
    whole = parse_all(make(context_of(example)), example.text, example.finish_reason)
    for end in range(len(example.text)):
        parser = make(context_of(example))
        part = parse_all(parser, example.text[:end], "length")
        for got, full in zip(part.calls, whole.calls, strict=False):
            assert (got.id, got.name) == (full.id, full.name)
            assert full.arguments.startswith(got.arguments)
        # One more than there are: cut in front of arguments that turn out to be none, so that it is text.
        is_more = len(part.calls) > len(whole.calls)
        if part.calls and (is_more or part.calls[-1].arguments != whole.calls[len(part.calls) - 1].arguments):
            assert parser.incomplete and (not is_more or part.calls[-1].arguments == "")


# One token each, so that no output ends inside of one; `<` and `[` alone are text.
TOKENS = re.compile(r"<\|?[/\w｜▁]*[|>]?>?|\[[A-Z_]*\]?")
WITH_CALLS = [
    pytest.param(name, example, id=f"{name}-{index}")
    for name, examples in tool_examples().items()
    for index, example in enumerate(examples)
    if example.calls and example.finish_reason == "stop"
]


@pytest.mark.parametrize("knows_tools", [True, False])
@pytest.mark.parametrize(("name", "example"), WITH_CALLS)
def test_a_cut_call_leaves_no_markup_in_content(name: str, example: Example, knows_tools: bool):
    """The bug: a call that the length limit cut inside its name was content, marks and all, in every format but
    gpt-oss."""
    tools = example.tools or tuple(ToolSpec(name) for name, _ in example.calls)
    context = replace(context_of(example), tools=tools if knows_tools else None)
    whole = parse_all(tool_formats()[name].make(context), example.text)
    inside = {at for token in TOKENS.finditer(example.text) for at in range(token.start() + 1, token.end())}
    for end in sorted({*range(len(example.text) + 1)} - inside):
        text = example.text[:end]
        content = parse_all(tool_formats()[name].make(context), text, "length").content
        if name in ("json", "llama", "pythonic") and content == text and not text.startswith("<|"):
            # Nothing but a function's name tells these calls from text.
            assert not any(f'"{tool.name}' in text or f"[{tool.name}" in text for tool in tools)
            continue
        assert whole.content.startswith(content.rstrip()), (text, content)


def test_text_that_a_limit_cut_is_kept():
    """What is behind a mark and can be no call on offer is text, cut or not."""
    weather = (ToolSpec("weather"), ToolSpec("we"))
    for name, text in (
        ("qwen", "the `<tool_call>` tag"),
        ("qwen", '<tool_call>{"name": "oth'),
        ("kimik2", "<|tool_call_begin|>functions.oth"),
        ("kimik2", "<|tool_call_begin|> begins a call"),
        ("deepseek31", "<｜tool▁call▁begin｜>oth"),
        ("deepseek32", '<｜DSML｜invoke name="oth'),
        ("glm45_moe", "<tool_call>weather is what"),
        ("qwen_coder", "<tool_call> then <function=oth"),
        ("mistral", "[TOOL_CALLS] weather? No"),
        ("llama", "<|python_tag|>print("),
        ("llama", '{"name": "Wei'),
        ("json", '{"na'),
        ("json", '[{"city": "we'),
        ("pythonic", "["),
        ("pythonic", "[see"),
    ):
        parser = tool_formats()[name].make(ParseContext(tools=weather))
        assert parse_all(parser, text, "length").content == text, name
        assert not parser.incomplete


@pytest.mark.parametrize(("make", "example"), EXAMPLES)
def test_feeding_nothing_changes_nothing(make: Make, example: Example):
    parser = make(context_of(example))
    deltas = parser.feed("") + parser.feed(example.text) + parser.feed("") + parser.flush(example.finish_reason)
    assert assemble(merged(deltas)) == parse_all(make(context_of(example)), example.text, example.finish_reason)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_carry_samples(name: str):
    _, examples = FORMATS[name]
    assert len(examples) >= 2
    if name.startswith("tools/") and name != "tools/passthrough":
        assert any(example.calls for example in examples)
        assert any(len(example.calls) > 1 for example in examples)
        assert any(example.incomplete and example.finish_reason == "length" for example in examples)
        assert any("-" in call and "." in call for example in examples for call, _ in example.calls), (
            "name with - and ."
        )
        assert any(example.tools and not example.calls and example.content == example.text for example in examples)


def test_a_bracket_that_closes_nothing_is_text() -> None:
    """Regression: pythonic calls took it for the end of a list that had never begun."""
    for text in ("](http://x)", "]", " ] and more"):
        deltas = stream(tool_formats()["pythonic"].make(ParseContext(tools=())), [text], "stop")
        assert assemble(deltas).content == text


def _without_object(example: Example, value: str) -> str | None:
    """The sample with `value` in place of the first arguments that stand in it as a JSON object."""
    wanted = [arguments for _, arguments in example.calls]
    for at, char in enumerate(example.text):
        if char == "{":
            try:
                found, end = json.JSONDecoder().raw_decode(example.text, at)
            except ValueError:
                continue
            if found in wanted:
                return example.text[:at] + value + example.text[end:]
    return None


SPOILED = [
    pytest.param(make, example, text, id=f"{name}-{index}-{value}")
    for name, (make, examples) in FORMATS.items()
    if name.startswith("tools/")
    for index, example in enumerate(examples)
    if not example.incomplete
    for value in ("[1]", "[]", "1", "true", '"x"', "null", '[{"a": 1}]')
    if (text := _without_object(example, value)) is not None
]


@pytest.mark.parametrize(("make", "example", "text"), SPOILED)
def test_arguments_that_are_no_object_make_no_malformed_call(make: Make, example: Example, text: str):
    """The bug: `[1]` in Kimi K3's json element was a call that was begun and never ended. It is text, or, where a value
    stands for no arguments, a call without any."""
    parser = make(context_of(example))
    parsed = parse_all(parser, text, "stop")
    assert not parser.incomplete
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict), call
    assert_law(lambda: make(context_of(example)), text, list(text), "stop")
