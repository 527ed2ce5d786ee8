"""What the tests of this room share: running a parser over pieces, and samples that went wrong on purpose."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    Example,
    ParseContext,
    Parsed,
    Parser,
    ReasoningDelta,
    ToolCallAbandoned,
    ToolCallArguments,
)

MARKS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>",
        "<think>",
        "</think>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁sep｜>", "<|tool_call_end|>", "<｜DSML｜function_calls>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|open|>", "<|close|>", "<|sep|>", "tools", "think"),
    *("{", "}", "[", "]", "(", ")", '"', "'", "\\", "\n", " ", ",", ":", "ü", '{"name": "f", "arguments": {"a": 1}}'),
)


def context_of(example: Example) -> ParseContext:
    numbers = itertools.count(1)
    return ParseContext(
        tools=example.tools, prompt=example.prompt, hex_digits=lambda count: f"{next(numbers):0{count}x}"
    )


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def stream(parser: Parser, pieces: Iterable[str], finish_reason: str) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.flush(finish_reason)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind joined: stricter than `assemble`, the order between kinds counts."""
    result: list[Delta] = []
    for delta in deltas:
        match (result[-1] if result else None), delta:
            case ReasoningDelta(a), ReasoningDelta(b):
                result[-1] = ReasoningDelta(a + b)
            case ContentDelta(a), ContentDelta(b):
                result[-1] = ContentDelta(a + b)
            case ToolCallArguments(i, a), ToolCallArguments(j, b) if i == j:
                result[-1] = ToolCallArguments(i, a + b)
            case _:
                result.append(delta)
    return result


def assert_law(make: Callable[[], Parser], text: str, pieces: list[str], finish_reason: str) -> None:
    whole, split = make(), make()
    expected = merged(stream(whole, [text], finish_reason))
    assert merged(stream(split, pieces, finish_reason)) == expected
    assert split.incomplete == whole.incomplete
    is_abandoned = any(isinstance(delta, ToolCallAbandoned) for delta in expected)
    # A call that was cut before it could begin was not begun.
    assert whole.incomplete == is_abandoned or (whole.incomplete and finish_reason == "length")
    assert split.in_reasoning == whole.in_reasoning


def assert_example(parsed: Parsed, incomplete: bool, example: Example) -> None:
    assert parsed.content == example.content
    assert parsed.reasoning == example.reasoning
    assert [call.name for call in parsed.calls] == [name for name, _ in example.calls]
    for call, (_, wanted) in zip(parsed.calls, example.calls, strict=True):
        got: Any = call.arguments if example.incomplete else json.loads(call.arguments)
        assert got == wanted
    assert incomplete == example.incomplete


@st.composite
def spoiled(draw: st.DrawFn, examples: tuple[Example, ...]) -> tuple[Example, str, list[str], str]:
    """(example, its text after up to three mutations, the text in pieces, finish reason)."""
    example = draw(st.sampled_from(examples))
    text = example.text
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        kind = draw(st.sampled_from(("cut", "delete", "insert", "append", "repeat")))
        if kind == "cut":
            text = text[:at]
        elif kind == "delete":
            text = text[:at] + text[at + draw(st.integers(1, 12)) :]
        elif kind == "insert":
            text = text[:at] + draw(st.sampled_from(MARKS)) + text[at:]
        elif kind == "append":
            text += draw(st.sampled_from(examples)).text
        else:
            text = text[:at] + text[max(0, at - draw(st.integers(1, 30))) :]
    pieces = cut(text, draw(st.lists(st.integers(0, 10_000), max_size=12)))
    return example, text, pieces, draw(st.sampled_from(("stop", "length")))
