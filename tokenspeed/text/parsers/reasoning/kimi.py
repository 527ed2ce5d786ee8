"""Kimi's first thinking models (Kimi-VL): `◁think▷` ... `◁/think▷`."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits
from tokenspeed.text.parsers.think import ThinkTags, think_format

_TAGS = ThinkTags(open="◁think▷", close="◁/think▷")


def why_not(traits: ModelTraits) -> str | None:
    """The template knows the tags, or the architecture is theirs."""
    return None if traits.architecture == "KimiVLForConditionalGeneration" else traits.missing("◁think▷")


FORMAT = think_format(("kimi",), _TAGS, "no", why_not, rank=20, needs_special_tokens=True)

EXAMPLES = (
    Example("Nur ◁ Text", "Nur ◁ Text"),
    Example("◁think▷Hm ◁/thin ...◁/think▷Ja", "Ja", "Hm ◁/thin ..."),
    Example("◁think▷", finish_reason="length"),
)
