"""gpt-oss: messages to `functions.NAME` in the harmony format (see `harmony`)."""

from __future__ import annotations

from tokenspeed.text.parsers.harmony import SPELLINGS, HarmonyParser
from tokenspeed.text.parsers.interface import Example, MessageMarks, ModelTraits, ParseContext, ToolFormat, ToolSpec


def make(context: ParseContext) -> HarmonyParser:
    """Without a reasoning parser: reasoning is content."""
    return HarmonyParser(context, separate_reasoning=False, parse_calls=True)


def why_not(traits: ModelTraits) -> str | None:
    """The architecture, or a template that writes the channel."""
    return None if traits.architecture == "GptOssForCausalLM" else traits.missing("<|channel|>analysis")


def _headers(name: str) -> tuple[str, ...]:
    """The recipient behind the channel, as the model writes it, or in front, as its template does in the prompt."""
    kinds = ("<|message|>", " json<|message|>", " <|constrain|>json<|message|>", "<|constrain|>json<|message|>")
    behind = (f"<|channel|>commentary to=functions.{name}{kind}" for kind in kinds)
    in_front = (f" to=functions.{name}<|channel|>commentary{kind}" for kind in kinds)
    return (*behind, *in_front)


FORMAT = ToolFormat(
    names=("gpt-oss", "gpt_oss", "harmony"),
    make=make,
    why_not=why_not,
    rank=10,
    needs_special_tokens=True,
    whole=HarmonyParser,
    messages=MessageMarks(
        specials=SPELLINGS,
        begin="<|start|>assistant",
        end="<|end|>",
        reasoning="<|channel|>analysis<|message|>",
        preamble="<|channel|>commentary<|message|>",
        answer=("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
        call=_headers,
    ),
)

EXAMPLES = (
    Example(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get-w.x "
        '<|constrain|>json<|message|>{"city": "Zürich \\"<\\"}"}<|call|><|start|>assistant to=functions.g<|channel|>'
        "commentary json<|message|> <|call|>",
        "I look.",
        calls=(("get-w.x", {"city": 'Zürich "<"}'}), ("g", {})),
    ),
    Example(
        "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>[1]",
        "Hi\n<|start|>assistant<|channel|>commentary to=functions.f<|message|>[1]",
    ),
    Example(
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        tools=(ToolSpec("g"),),
    ),
    Example(
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b',
        calls=(("f", '{"a": "b'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        '<|channel|>commentary to=functions.f<|message|>{"a": <|end|>',
        calls=(("f", '{"a": '),),
        incomplete=True,
    ),
    Example(
        "<|channel|>final<|message|>A<|end|><|start|>assistant<|channel|>commentary to=functions.weath",
        "A",
        tools=(ToolSpec("weather"),),
        finish_reason="length",
    ),
)
