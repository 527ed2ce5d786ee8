"""gpt-oss: the `analysis` channel of the harmony format (see `harmony`)."""

from __future__ import annotations

from tokenspeed.text.parsers.harmony import HarmonyParser
from tokenspeed.text.parsers.interface import Example, ModelTraits, ParseContext, ReasoningFormat


def make(context: ParseContext) -> HarmonyParser:
    """Without a tool parser: calls stay content."""
    return HarmonyParser(context, separate_reasoning=True, parse_calls=False)


def why_not(traits: ModelTraits) -> str | None:
    """The architecture, or a template that writes the channel."""
    return None if traits.architecture == "GptOssForCausalLM" else traits.missing("<|channel|>analysis")


FORMAT = ReasoningFormat(
    names=("gpt-oss", "gpt_oss", "harmony"),
    make=make,
    why_not=why_not,
    rank=10,
    starts="prompt",
    start_marker="<|channel|>analysis<|message|>",
    end_marker="<|channel|>final<|message|>",
    closing="<|end|><|start|>assistant<|channel|>final<|message|>",
    over_mark="<|end|>",
    way_out=("<|start|>", "<|channel|>", "<|return|>", "<|call|>"),
    opens_answer=True,
    needs_special_tokens=True,
    whole=HarmonyParser,
)

_PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"

EXAMPLES = (
    Example("Kein Harmony <b>.", "Kein Harmony <b>."),
    Example(
        "<|channel|>analysis<|message|>Hm <| ü.<|end|><|start|>assistant<|channel|>final<|message|>"
        "4, <|not|> 5<|return|>",
        "4, <|not|> 5",
        "Hm <| ü.",
        prompt=_PROMPT,
    ),
    Example(
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>C<|end|><|start|>assistant<|channel|>final<|message|>D",
        "C\nD",
        "A\nB",
    ),
    Example("ut<|end|>", "", "ut", prompt=_PROMPT + "<|channel|>analysis<|message|>Abo"),
    Example("answer<|return|>", "answer", prompt=_PROMPT + "<|channel|>final<|message|>"),
    Example("<|channel|>analysis<|message|>cut", reasoning="cut", finish_reason="length"),
    Example("<|channel|>ana", finish_reason="length"),
    Example(
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
    ),
)
