"""Qwen3 models that always think: the generation begins inside `<think>`."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags()


def why_not(traits: ModelTraits) -> str | None:
    """The template opens the tag itself and has no switch."""
    if "enable_thinking" in traits.template:
        return "the chat template has the switch enable_thinking"
    return traits.missing("<|im_start|>assistant\\n<think>")


FORMAT = think_format(("qwen3_thinking", "qwen3-thinking"), _TAGS, "yes", why_not, rank=40)

EXAMPLES = (
    Example("Hm.\n</think>\n\nAnswer", "Answer", "Hm."),
    Example("<think>\nHm.\n\n</think>Answer\n", "Answer\n", "Hm."),
    Example("only thoughts, ever\n", reasoning="only thoughts, ever"),
    Example("plain", "plain", prompt="<think>\n\n</think>\n\n"),
)
