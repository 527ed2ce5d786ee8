"""Kimi K3: the `tools` channel of XTML (see `xtml`). Ids are `NAME:N`, N counted over the conversation."""

from __future__ import annotations

from tokenspeed.text.parsers.interface import Example, ModelTraits, ParseContext, ToolFormat, ToolSpec
from tokenspeed.text.parsers.xtml import CALLS, XtmlParser, xtml_id


def make(context: ParseContext) -> XtmlParser:
    """Without a reasoning parser: reasoning is content."""
    return XtmlParser(context, separate_reasoning=False, parse_calls=True)


def why_not(traits: ModelTraits) -> str | None:
    """The architecture, or a template that writes the brackets."""
    own = traits.architecture == "KimiK3ForConditionalGeneration"
    return None if own else traits.missing("<|open|>", "<|sep|>", "<|close|>")


FORMAT = ToolFormat(
    names=("kimi_k3",),
    make=make,
    why_not=why_not,
    rank=10,
    needs_special_tokens=True,
    whole=XtmlParser,
    ids=xtml_id,
    marks=CALLS,
)

EXAMPLES = (
    Example(
        'Ok<|close|>response<|sep|><|open|>tools<|sep|>\n<|open|>call tool="get-w.x" index="1"<|sep|>\n'
        '<|open|>argument key="a &quot;&amp;lt;" type="string"<|sep|>Zürich "<b>"\n<|close|>argument<|sep|>\n'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="o" type="object"<|sep|>{"x": [null]}<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        "Ok",
        calls=(("get-w.x", {'a "&lt;': 'Zürich "<b>"\n', "n": 3, "o": {"x": [None]}}), ("g", {})),
        prompt="<|open|>response<|sep|>",
    ),
    Example(
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        calls=(("f", {"a": 1}),),
    ),
    Example(
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>b\n'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>call<|sep|><|close|>tools<|sep|>',
        calls=(("f", {"a": "b", "n": 3}),),
    ),
    Example('<|open|>call tool="f"<|sep|>x', '<|open|>call tool="f"<|sep|>x', tools=(ToolSpec("f"),)),
    Example(
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>b',
        calls=(("f", '{"a": "b'),),
        finish_reason="length",
        incomplete=True,
    ),
    Example(
        'A<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weath',
        "A",
        tools=(ToolSpec("weather"),),
        prompt="<|open|>response<|sep|>",
        finish_reason="length",
        incomplete=True,
    ),
)
