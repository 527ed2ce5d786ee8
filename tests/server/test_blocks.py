"""Deltas as a row of blocks: order, white space, what is whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.server.blocks import Blocks, Closed, Grown, Opened, Step
from tokenspeed.server.carried import pack, unpack
from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallStart,
)
from tokenspeed.text.parsers.model_json import json_object

CALL: list[Delta] = [ToolCallStart(0, "c0", "f"), ToolCallArguments(0, '{"a"'), ToolCallArguments(0, ": 1}")]


def closed(deltas: list[Delta], cut: bool = False) -> list[Closed]:
    blocks = Blocks()
    return [step for step in (*blocks.feed(deltas), *blocks.finish(cut)) if isinstance(step, Closed)]


def test_blocks_follow_each_other():
    found = closed([ReasoningDelta("hm"), ContentDelta("a "), ContentDelta("b"), *CALL, ContentDelta("end")])
    assert [(block.index, block.kind, block.text) for block in found] == [
        (0, "reasoning", "hm"),
        (1, "text", "a b"),
        (2, "call", '{"a": 1}'),
        (3, "text", "end"),
    ]
    assert (found[2].call_id, found[2].name) == ("c0", "f") and all(block.whole for block in found)


@pytest.mark.parametrize("space", ["\n", " \n\n"])
def test_white_space_alone_is_no_block(space: str):
    deltas: list[Delta] = [ReasoningDelta("hm"), ContentDelta(space), *CALL, ContentDelta(space)]
    assert [block.kind for block in closed(deltas)] == ["reasoning", "call"]
    assert [block.text for block in closed([ReasoningDelta(space), ContentDelta(space), ContentDelta("a")])] == [
        space + "a"
    ]


def test_what_the_limit_cut_is_not_whole():
    assert [block.whole for block in closed([ReasoningDelta("hm"), ContentDelta("a")], cut=True)] == [True, False]
    assert [block.whole for block in closed(CALL, cut=True)] == [False]
    assert [block.whole for block in closed([*CALL[:2], ToolCallAbandoned(0)])] == [False]
    assert closed([]) == []


def test_what_the_parser_abandoned_is_not_whole():
    """The bug: a call was whole when its arguments were JSON, whatever was wrong with the rest of it."""
    again: list[Delta] = [ToolCallStart(1, "c1", "f"), ToolCallArguments(1, "{}")]
    found = closed([*CALL, ToolCallAbandoned(0), ContentDelta("oops"), *again])
    assert [(block.kind, block.whole) for block in found] == [("call", False), ("text", True), ("call", True)]
    assert [block.whole for block in closed([*CALL, *again, ToolCallAbandoned(1)])] == [True, False]


PIECES = st.one_of(
    st.builds(ReasoningDelta, st.text(" \nab", max_size=3)), st.builds(ContentDelta, st.text(" \nab", max_size=3))
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=12), st.integers(1, 4))
def test_steps_are_well_formed_and_do_not_depend_on_batches(deltas: list[Delta], size: int):
    one, many = Blocks(), Blocks()
    steps = [*one.feed(deltas), *one.finish(False)]
    batches = [step for at in range(0, len(deltas), size) for step in many.feed(deltas[at : at + size])]
    assert [*batches, *many.finish(False)] == steps
    check(steps)
    # Only white space may be missing, and nothing is said twice.
    for kind, delta_type in (("reasoning", ReasoningDelta), ("text", ContentDelta)):
        said = "".join(step.text for step in steps if isinstance(step, Closed) and step.kind == kind)
        given = "".join(delta.text for delta in deltas if isinstance(delta, delta_type))
        assert "".join(said.split()) == "".join(given.split())


def check(steps: list[Step]) -> None:
    """Opened, grown, closed, one block after the other."""
    text, current = "", None
    for number, step in enumerate(step for step in steps if isinstance(step, Opened)):
        assert step.index == number
    for step in steps:
        match step:
            case Opened(index):
                assert current is None
                current, text = index, ""
            case Grown(index, _, more):
                assert index == current and more
                text += more
            case Closed(index, _, whole_text):
                assert index == current and whole_text == text and text.strip()
                current = None
    assert current is None


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_carried_reasoning_comes_back(text: str):
    assert unpack(pack(text)) == text


@pytest.mark.parametrize("other", ["", "gAAAAB", "tsr1.%%%", "tsr1.gA==", "tsr1.AAA"])
def test_what_was_not_packed_is_not_unpacked(other: str):
    assert unpack(other) is None


def test_json_objects():
    assert json_object('{"a": [1]}') == {"a": [1]}
    assert all(
        json_object(text) is None for text in ("", "[1]", "{", '{"a": NaN}', '{"a": -Infinity}', '"a"', "[" * 100_000)
    )
