"""GLM 4.5 and later: `<think>` ... `</think>`, switched by `enable_thinking`."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags()


def why_not(traits: ModelTraits) -> str | None:
    """GLM's opening mark and the tag."""
    return traits.missing("[gMASK]", "</think>")


FORMAT = think_format(("glm45",), _TAGS, "no", why_not, rank=30)

EXAMPLES = (
    Example("No reasoning, a < b, </think> ", "No reasoning, a < b, </think> "),
    Example(
        "<think>\nHm, <b>, </thin\n</think>\n\nAnswer </think> <think> ", "Answer </think> <think> ", "Hm, <b>, </thin"
    ),
    Example("Plan ü</think>\n\n Yes", " Yes", "Plan ü", prompt="<x>assistant\n<think>\n"),
    Example("<think> cut", reasoning=" cut", finish_reason="length"),
    Example("off</think>", "off</think>", prompt="<think>\n\n</think>\n\n"),
)
