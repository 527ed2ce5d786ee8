"""DeepSeek R1 and its distillations: the generation begins inside `<think>`.

Source: the model card; early templates left the tag to the model, which then writes it itself.
"""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags()


def why_not(traits: ModelTraits) -> str | None:
    """The template opens the tag behind the assistant mark and has no switch."""
    if "thinking" in traits.template:
        return "the chat template has a switch for thinking"
    return traits.missing("<｜Assistant｜>", "</think>")


FORMAT = think_format(("deepseek_r1", "deepseek-r1"), _TAGS, "yes", why_not, rank=40)

EXAMPLES = (
    Example("Hm.\n</think>\n\nAnswer", "Answer", "Hm."),
    Example("<think>\nHm.\n\n</think>Answer\n", "Answer\n", "Hm."),
    Example("only thoughts, ever\n", reasoning="only thoughts, ever"),
    Example("plain", "plain", prompt="<think>\n\n</think>\n\n"),
)
