"""Qwen3 and Qwen3.5 with the `enable_thinking` switch: the model opens `<think>`, or the prompt ends with it."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags()


def why_not(traits: ModelTraits) -> str | None:
    """The template has the switch and the tag."""
    return traits.missing("enable_thinking", "</think>", "<|im_start|>")


FORMAT = think_format(("qwen3",), _TAGS, "no", why_not, rank=50)

EXAMPLES = (
    Example("No reasoning, a < b, </think> ", "No reasoning, a < b, </think> "),
    Example(
        "<think>\nHm, <b>, </thin\n</think>\n\nAnswer </think> <think> ", "Answer </think> <think> ", "Hm, <b>, </thin"
    ),
    Example("Plan ü</think>\n\n Yes", " Yes", "Plan ü", prompt="<x>assistant\n<think>\n"),
    Example("<think> cut", reasoning=" cut", finish_reason="length"),
    Example("off</think>", "off</think>", prompt="<think>\n\n</think>\n\n"),
)
