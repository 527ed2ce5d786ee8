"""Kimi K2.5: `<think>` ... `</think>`, switched by the template's `thinking`.

Text is given exactly. A call's section ends the reasoning too, the models are known to forget the tag.
"""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags(trims=False, implicit_ends=("<|tool_calls_section_begin|>",))


def why_not(traits: ModelTraits) -> str | None:
    """The architecture."""
    wanted = "KimiK25ForConditionalGeneration"
    return None if traits.architecture == wanted else f"the architecture is not {wanted}"


FORMAT = think_format(("kimi_k25",), _TAGS, "prompt", why_not, rank=20, needs_special_tokens=True)

EXAMPLES = (
    Example("No reasoning, a < b, </think> ", "No reasoning, a < b, </think> "),
    Example(
        "<think>\nHm, <b>, </thin\n</think>\n\nAnswer </think> <think> ",
        "\n\nAnswer </think> <think> ",
        "\nHm, <b>, </thin\n",
    ),
    Example("Plan ü</think>\n\n Yes", "\n\n Yes", "Plan ü", prompt="<x>assistant\n<think>\n"),
    Example("<think> cut", reasoning=" cut", finish_reason="length"),
    Example("off</think>", "off</think>", prompt="<think>\n\n</think>\n\n"),
    Example("I call<|tool_calls_section_begin|>x", "<|tool_calls_section_begin|>x", "I call", prompt="<think>"),
)
