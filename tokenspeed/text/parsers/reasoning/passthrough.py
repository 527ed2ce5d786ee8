"""No reasoning is told apart: all text is content."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    Example,
    ModelTraits,
    ParseContext,
    ReasoningFormat,
)


class Passthrough:
    """`interface.Parser` that gives the text back."""

    in_reasoning = False
    incomplete = False
    num_whole_calls = 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def flush(self, finish_reason: str) -> list[Delta]:
        return []


def make(context: ParseContext) -> Passthrough:
    """A parser for one sequence."""
    return Passthrough()


def why_not(traits: ModelTraits) -> str | None:
    """The last resort of `auto`."""
    return None


FORMAT = ReasoningFormat(names=("passthrough",), make=make, why_not=why_not, rank=100)

EXAMPLES = (Example("<think>a</think> b ", "<think>a</think> b "), Example("c", "c", prompt="<think>"))
