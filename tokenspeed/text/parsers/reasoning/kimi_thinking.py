"""Kimi K2 Thinking: the generation begins inside `<think>`.

Text is given exactly. A call's section ends the reasoning too, the model is known to forget the tag.
"""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags(trims=False, implicit_ends=("<|tool_calls_section_begin|>",))


def why_not(traits: ModelTraits) -> str | None:
    """Kimi K2's template with the tag."""
    return traits.missing("<|im_middle|>", "<think>")


FORMAT = think_format(("kimi_thinking", "kimi_k2"), _TAGS, "yes", why_not, rank=30, needs_special_tokens=True)

EXAMPLES = (
    Example("Hm\n</think>\nJa", "\nJa", "Hm\n"),
    Example("<think>Hm</think>Ja", "Ja", "Hm"),
    Example("I call <|tool_calls_section_begin|>x</think>", "<|tool_calls_section_begin|>x</think>", "I call "),
    Example("Ja", "Ja", prompt="<think></think>"),
)
