"""DeepSeek V3.1, V3.2 and V4: the template's `thinking` switch ends the prompt with `<think>` or `</think>`.

Text is given exactly: the templates put nothing between tags and text.
"""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags(trims=False)


def why_not(traits: ModelTraits) -> str | None:
    """The template has the switch and DeepSeek's marks, or the architecture has no template."""
    if traits.architecture in ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"):
        return None
    return traits.missing("<｜Assistant｜>", "</think>", "thinking")


FORMAT = think_format(("deepseek_v31", "deepseek-v3", "deepseek_v3"), _TAGS, "prompt", why_not, rank=30)

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
)
