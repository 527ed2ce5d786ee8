"""Kimi K3: the `think` channel of XTML (see `xtml`). The prompt's end says whether the generation begins in it."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits, ParseContext, ReasoningFormat
from tokenspeed.text.parsers.xtml import THINK_END, XtmlParser


def make(context: ParseContext) -> XtmlParser:
    """Without a tool parser: calls stay content."""
    return XtmlParser(context, separate_reasoning=True, parse_calls=False)


def why_not(traits: ModelTraits) -> str | None:
    """The architecture, or a template that writes the brackets."""
    own = traits.architecture == "KimiK3ForConditionalGeneration"
    return None if own else traits.missing("<|open|>", "<|sep|>", "<|close|>")


FORMAT = ReasoningFormat(
    names=("kimi_k3",),
    make=make,
    why_not=why_not,
    rank=10,
    starts="prompt",
    end_marker=THINK_END,
    needs_special_tokens=True,
    whole=XtmlParser,
)

_PROMPT = '<|open|>message role="assistant"<|sep|>'

EXAMPLES = (
    Example("Plain <|x|> text ", "Plain <|x|> text "),
    Example(
        "Hm <|close .<|close|>think<|sep|><|open|>response<|sep|> Ja ü\n<|close|>response<|sep|><|close|>message<|sep|>"
        "<|end_of_msg|>",
        " Ja ü\n",
        "Hm <|close .",
        prompt=_PROMPT + "<|open|>think<|sep|>",
    ),
    Example("<|open|>think<|sep|>a<|close|>think<|sep|>\n<|open|>response<|sep|>b", "b", "a", prompt=_PROMPT),
    Example("b<|close|>response<|sep|>", "b", prompt=_PROMPT + "<|open|>response<|sep|>"),
    Example("cut <|clo", "", "cut <|clo", prompt=_PROMPT + "<|open|>think<|sep|>", finish_reason="length"),
)
