"""Reasoning and tools together, places in the prompt, ids, and reading harmony by token id."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_laws import cut, merged

from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.parsers.harmony import SPELLINGS, HarmonyParser
from tokenspeed.text.parsers.interface import (
    ContentDelta,
    ParseContext,
    ParsedCall,
    ReasoningDelta,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallStart,
    assemble,
    parse_all,
    tool_specs,
)
from tokenspeed.text.parsers.pipeline import ParserPipeline, build_pipeline
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"a": 1}<|call|>'
)
XTML = (
    "Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="integer"<|sep|>1<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)


def pipeline(reasoning: str, tools: str, context: ParseContext | None = None, **switches: bool) -> ParserPipeline:
    fixed = context or ParseContext(hex_digits=lambda count: "0" * count)
    return build_pipeline(reasoning_formats()[reasoning], tool_formats()[tools], fixed, **switches)


def test_calls_are_read_only_behind_the_reasoning():
    parser = pipeline("qwen3", "qwen")
    parsed = parse_all(parser, f"<think>\nI could {CALL}\n</think>\n\nSo: {CALL}")
    assert parsed.reasoning == f"I could {CALL}"
    assert parsed.content == "So:"
    assert parsed.calls == (ParsedCall("call_" + "0" * 24, "f", '{"a": 1}'),)
    assert parser.num_calls == 1
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
    assert parser.finish_reason("abort") == "abort"


def test_deltas_come_as_soon_as_they_are_certain():
    parser = pipeline("qwen3", "qwen")
    steps = [
        "<thi",
        "nk>\nHm",
        "\n",
        "</think>",
        "\n\nA",
        " ",
        '<tool_call>{"name": "f"',
        ', "arguments": {"a',
        '": "x',
    ]
    given_ = [parser.feed(step) for step in steps]
    assert given_ == [
        *([], [ReasoningDelta("Hm")], [], [], [ContentDelta("A")], [], []),
        [ToolCallStart(0, "call_" + "0" * 24, "f"), ToolCallArguments(0, '{"a')],
        [ToolCallArguments(0, '": "x')],
    ]
    assert parser.flush("length") == [ToolCallAbandoned(0)]
    assert parser.incomplete
    assert parser.finish_reason("stop") == "stop"


def test_a_whole_call_before_a_cut_one_does_not_make_the_message_whole():
    parser = pipeline("passthrough", "qwen")
    parsed = parse_all(parser, CALL + '<tool_call>{"name": "g", "arguments": {"a', "length")
    assert [call.arguments for call in parsed.calls] == ['{"a": 1}', '{"a']
    assert parser.incomplete


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}",
        ),
        ("kimi_k3", "Hm.<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>"),
        ("qwen3", "<think>Hm.</think>{}"),
    ],
)
def test_forced_calls_behind_reasoning_that_is_not_separated(name: str, text: str, separate: bool):
    """The bug: with `separate_reasoning` false, forced calls of a model with channels stayed text: the reasoning in
    front of them was content, too, before calls were looked for."""
    prompt = "<|open|>think<|sep|>" if name == "kimi_k3" else None
    context = ParseContext(prompt=prompt, hex_digits=lambda count: "0" * count)
    parser = pipeline(name, "json", context, separate_reasoning=separate)
    parsed = parse_all(parser, text.format('[{"name": "f", "parameters": {"a": 1}}]'))
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"a": 1}')]
    assert "Hm." in (parsed.reasoning if separate else parsed.content)
    assert parser.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": 1} Hello.<|call|>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>'),
        ("json", '{"name": "f", "arguments": {"a": NaN}}'),
    ],
)
def test_arguments_that_are_no_json_make_no_whole_call(name: str, text: str):
    """The bug: only brackets and quotes were looked at, so the answer ended with `tool_calls` although its arguments
    could not be read."""
    parser = pipeline("gpt-oss" if name == "gpt-oss" else "passthrough", name)
    assert len(parse_all(parser, text).calls) == 1
    assert parser.incomplete and parser.num_whole_calls == 0 and parser.finish_reason("stop") == "stop"


@pytest.mark.parametrize("arguments", ["[1]", '"text"', "Hello.", "5", '"[1]"', "true"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|> {}"),
        ("qwen", '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'),
        ("qwen", '<tool_call>{{"arguments": {}, "name": "f"}}</tool_call>'),
        ("json", '{{"name": "f", "parameters": {}}}'),
        ("llama", '<|python_tag|>{{"name": "f", "parameters": {}}}'),
        ("mistral", "[TOOL_CALLS]f[ARGS] {}"),
        ("mistral", '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]'),
        ("kimik2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ("deepseek31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek32", '<｜DSML｜invoke name="f">\n{}</｜DSML｜invoke>'),
    ],
)
def test_with_arguments_that_are_no_object_it_is_no_call(name: str, text: str, arguments: str):
    """The bug: `[1]` was a whole call, which sent back was a 400; the APIs did not agree on what it was."""
    whole = text.format(arguments)
    for size in (1, 3, len(whole)):
        parser = pipeline("gpt-oss" if name == "gpt-oss" else "passthrough", name)
        deltas = [delta for at in range(0, len(whole), size) for delta in parser.feed(whole[at : at + size])]
        parsed = assemble(deltas + parser.flush("stop"))
        assert not parsed.calls and parsed.content.strip() == whole.strip()
        assert not parser.incomplete and parser.finish_reason("stop") == "stop"


def test_without_calls_wanted_the_text_stays():
    assert parse_all(pipeline("qwen3", "qwen", parse_calls=False), f"<think>a</think>{CALL}").content == CALL


def test_reasoning_not_separated_is_content_as_written_and_still_no_place_for_calls():
    text = f"\n<think>\nI could {CALL}\n</think>\n\nSo:\n{CALL}"
    parser = pipeline("qwen3", "qwen", separate_reasoning=False)
    parsed = parse_all(parser, text)
    assert parsed.reasoning == ""
    assert parsed.content == text.removesuffix("\n" + CALL)
    assert len(parsed.calls) == 1
    assert parse_all(pipeline("deepseek_r1", "passthrough", separate_reasoning=False), "a\n</think>\n\nb").content == (
        "a\n</think>\n\nb"
    )


def test_reasoning_tokens_are_counted():
    parser = pipeline("qwen3", "passthrough")
    for token_id, piece in enumerate(["<think>", "a", "b", "</think>", "c", "d"]):
        parser.feed(piece, (token_id,))
    parser.flush("stop")
    assert parser.num_reasoning_tokens == 4


class Marked:
    """Bytes, and marks that are one token each."""

    strips_leading_space = False

    def __init__(self, marks: Sequence[str], special: bool = True) -> None:
        self.marks = tuple(marks)
        self.special_ids = frozenset(range(256, 256 + len(self.marks))) if special else frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.marks[token_id - 256].encode()

    def token_to_id(self, spelling: str) -> int | None:
        return 256 + self.marks.index(spelling) if spelling in self.marks else None

    def encode(self, text: str) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text) if self.marks else [text]
        return [
            one for piece in pieces for one in ([self.token_to_id(piece)] if piece in self.marks else piece.encode())
        ]


@pytest.mark.parametrize(
    ("format_name", "tokenizer", "text", "wanted"),
    [
        ("gpt-oss", Marked(SPELLINGS), HARMONY, 1 + 3 + 1),  # <|message|>, Hm., <|end|>
        ("gpt-oss", Marked(SPELLINGS), "<|channel|>final<|message|>Hm", 0),
        ("qwen3", Marked(("<think>", "</think>"), special=False), "<think>\nÜ\n</think>\n\nÄä", 1 + 4 + 1),
        ("qwen3", Marked(()), "<think>\nÜ\n</think>\n\nÄä", 1 + 4 + 8),
        ("qwen3", Marked(()), "No thought.", 0),
    ],
)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_reasoning_tokens_are_counted_however_they_come(
    format_name: str, tokenizer: Marked, text: str, wanted: int, data: st.DataObject
):
    """The bug: an output that came in one piece, as it does when it is not streamed, had no reasoning tokens."""
    ids = tokenizer.encode(text)
    places = data.draw(st.lists(st.integers(0, len(ids)), max_size=4).map(sorted))
    context = ParseContext(tokenizer=tokenizer)
    formats = (reasoning_formats()[format_name], tool_formats()["passthrough"])
    alone = build_pipeline(*formats, context)
    deltas = [alone.feed(text, ids), alone.flush("stop")]
    parser = build_pipeline(*formats, context, counting=tokenizer, skips_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, False, continues=True)
    parts = [ids[begin:end] for begin, end in itertools.pairwise([0, *places, len(ids)])]
    cut_deltas = [parser.feed(detokenizer.feed(part), part) for part in parts] + [parser.flush("stop")]
    assert parser.num_reasoning_tokens == wanted
    assert assemble(itertools.chain(*cut_deltas)) == assemble(itertools.chain(*deltas))


@pytest.mark.parametrize(
    ("name", "prompt", "thinking", "inside"),
    [
        ("qwen3", None, None, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", True, False),
        ("qwen3", "what is <think>? <|im_start|>assistant\n", None, False),
        ("qwen3_thinking", None, None, True),
        ("qwen3_thinking", None, False, False),
        ("deepseek_r1", "<｜Assistant｜>", None, True),
        ("deepseek_v31", "<｜Assistant｜></think>", None, False),
        ("deepseek_v31", "<｜Assistant｜><think>", None, True),
        ("base", "x<think>", False, True),
        ("passthrough", "x<think>", None, False),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', None, True),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', None, False),
        ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", None, True),
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>", None, False),
        ("gpt-oss", "<|start|>assistant", None, False),
    ],
)
def test_where_the_generation_begins(name, prompt, thinking, inside):
    parser = reasoning_formats()[name].make(ParseContext(prompt=prompt, thinking=thinking))
    assert parser.in_reasoning is inside


def test_channels_are_read_by_one_parser():
    parsed = parse_all(pipeline("gpt-oss", "gpt-oss"), HARMONY)
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == ("Hm.", "", 1)
    context = ParseContext(prompt="<|open|>think<|sep|>", history_calls=3)
    parsed = parse_all(pipeline("kimi_k3", "kimi_k3", context), XTML)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Ok")
    assert parsed.calls == (ParsedCall("f:3", "f", '{"a": 1}'),)


def test_channels_with_one_half_switched_off():
    assert parse_all(pipeline("passthrough", "gpt-oss"), HARMONY).content == "Hm."
    for parser in (pipeline("gpt-oss", "passthrough"), pipeline("gpt-oss", "gpt-oss", parse_calls=False)):
        parsed = parse_all(parser, HARMONY)
        assert parsed.reasoning == "Hm."
        assert parsed.calls == ()
        assert parsed.content == HARMONY[HARMONY.index("<|start|>") :]
    parsed = parse_all(pipeline("gpt-oss", "gpt-oss", separate_reasoning=False), HARMONY)
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == ("", "Hm.", 1)


@pytest.mark.parametrize(
    ("name", "head", "continued", "text", "reasoning", "content"),
    [
        ("qwen3", "assistant\n", "<think>\nHm", "\n\nso\n</think>\n\nYes", "\n\nso", "Yes"),
        ("qwen3", "assistant\n", "<think>\n", "\nso\n</think>Yes", "so", "Yes"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "<think>\nHm", ", so</think>Yes", ", so", "Yes"),
        ("qwen3", "assistant\n", "<think>\nHm\n</think>\n\nWell", "</think> <think>", "", "</think> <think>"),
        ("qwen3", "assistant\n", "<think>a</think> <think>b", "c</think>d", "c", "d"),
        ("qwen3", "assistant\n<think>\nHm\n</think>\n\n", "Well", ", <think> is a tag", "", ", <think> is a tag"),
        ("qwen3", "assistant\n", "", "<think>a</think>b", "a", "b"),
        ("qwen3", "say <think> or </think> assistant\n", "We", "ll", "", "ll"),
        ("deepseek_r1", "<A>", "The answer", " is 4", "", " is 4"),
        ("deepseek_r1", "<A>", "<think>\nHm", "</think>4", "", "4"),
        ("deepseek_r1", "<A>", "Hm</think>4", "</think>", "", "</think>"),
        ("deepseek_r1", "<A><think>\n", "Hm", "m</think>4", "m", "4"),
        ("kimi_k3", "<|open|>message<|sep|><|open|>think<|sep|>", "Hm", ".<|close|>think<|sep|>", ".", ""),
        ("kimi_k3", "<|open|>message<|sep|>", "<|open|>response<|sep|>a", "b<|close|>response<|sep|>", "", "b"),
        (
            "gpt-oss",
            "<|start|>assistant<|channel|>analysis<|message|>",
            "Hm",
            ".<|end|><|start|>assistant<|channel|>final<|message|>4",
            ".",
            "4",
        ),
    ],
)
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_continued_message_goes_on_where_it_was(
    name: str, head: str, continued: str, text: str, reasoning: str, content: str, trimmed: bool
):
    """The bug: only the prompt's very end was looked at, so a continued message that held an open block gave its
    reasoning as content, and one with a closed block, or an answer, could begin to reason again."""
    prompt = head + continued
    context = ParseContext(prompt=prompt.rstrip() if trimmed else prompt, continued=continued + " " * trimmed)
    parsed = parse_all(reasoning_formats()[name].make(context), text)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("reasoning", "tools", "text", "prompt"),
    [
        ("qwen3", "qwen", f"<think>\na\n{CALL}\n</think>\n\nb\n{CALL}\n{CALL}", None),
        ("qwen3_thinking", "qwen_coder", "a</think>\n<tool_call><function=f></function></tool_call>c", None),
        (
            "kimi_thinking",
            "kimik2",
            'a<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
            None,
        ),
        ("gpt-oss", "gpt-oss", HARMONY, None),
        ("kimi_k3", "kimi_k3", XTML, "<|open|>think<|sep|>"),
    ],
)
@pytest.mark.parametrize("separate", [True, False])
def test_pipeline_obeys_the_law(data, reasoning, tools, text, prompt, separate):
    text = text[: data.draw(st.integers(0, len(text)))]
    pieces = cut(text, data.draw(st.lists(st.integers(0, 500), max_size=10)))
    results = []
    for split in ([text], pieces, list(text)):
        context = ParseContext(prompt=prompt, hex_digits=lambda count: "0" * count)
        parser = pipeline(reasoning, tools, context, separate_reasoning=separate)
        deltas = [delta for piece in split for delta in parser.feed(piece)] + parser.flush("length")
        results.append((merged(deltas), parser.incomplete))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("tools", "text", "ids"),
    [
        (
            "kimik2",
            "<|tool_call_begin|>functions.f:9<|tool_call_argument_begin|>{}<|tool_call_end|>",
            ["functions.f:2"],
        ),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]f[ARGS]{}", ["abcDEF123", "aaaaaaaaa"]),
        ("mistral", '[TOOL_CALLS][{"id": "abcDEF123", "name": "f", "arguments": {}}]', ["abcDEF123"]),
        ("qwen", '<tool_call>{"id": "mine", "name": "f", "arguments": {}}</tool_call>', ["call_" + "a" * 24]),
        ("json", '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', ["call_" + "a" * 24] * 2),
    ],
)
def test_ids_have_the_familys_form(tools, text, ids):
    parser = tool_formats()[tools].make(ParseContext(history_calls=2, hex_digits=lambda count: "a" * count))
    assert [call.id for call in parse_all(parser, text).calls] == ids


def test_default_ids_are_random():
    calls = parse_all(tool_formats()["qwen"].make(ParseContext()), CALL + CALL).calls
    assert len({call.id for call in calls}) == 2
    for call in calls:
        assert call.id.startswith("call_")
        assert len(call.id) == 29
        int(call.id[5:], 16)


def test_tool_specs_from_wrapped_and_flat_tools():
    schema = {"type": "object"}
    wrapped, flat = tool_specs(
        [{"type": "function", "function": {"name": "a", "parameters": schema}}, {"type": "function", "name": "b"}]
    )
    assert (wrapped.name, wrapped.parameters, flat.name, flat.parameters) == ("a", schema, "b", {})


def test_no_tools_on_offer_means_no_calls():
    parser = tool_formats()["qwen"].make(ParseContext(tools=()))
    assert parse_all(parser, CALL).content == CALL


class Letters:
    """A tokenizer of bytes, with harmony's marks as ids from 256 on."""

    special_ids = frozenset(range(256, 256 + len(SPELLINGS) + 1))
    strips_leading_space = False

    def token_to_id(self, spelling: str) -> int | None:
        return 256 + SPELLINGS.index(spelling) if spelling in SPELLINGS else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b"<special>"

    def encode(self, *parts: str | int) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else part.encode()
        return ids

    def mark(self, spelling: str) -> int:
        token_id = self.token_to_id(spelling)
        assert token_id is not None
        return token_id


LETTERS = Letters()
START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL_MARK = (LETTERS.mark(spelling) for spelling in SPELLINGS)
IDS = LETTERS.encode(
    *(CHANNEL, "analysis", MESSAGE, "I write <|end|><|start|> ü", END, START, "assistant", CHANNEL),
    *("commentary to=functions.f ", CONSTRAIN, "json", MESSAGE, '{"a": "<|call|> é\ufdd0"}', CALL_MARK),
)


def by_ids(pieces: Sequence[Sequence[int]], prompt: str | None = None):
    parser = HarmonyParser(ParseContext(tokenizer=LETTERS, prompt=prompt), True, True)
    deltas = [delta for piece in pieces for delta in parser.feed("ignored", piece)]
    return merged([*deltas, *parser.flush("stop")]), parser


def test_harmony_by_ids_tells_marks_from_their_spelling():
    deltas, parser = by_ids([IDS])
    parsed = assemble(deltas)
    assert parsed.reasoning == "I write <|end|><|start|> ü"
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"a": "<|call|> é\ufffd"}]
    assert not parser.incomplete


@settings(max_examples=50, deadline=None)
@given(bounds=st.lists(st.integers(0, len(IDS)), max_size=12))
def test_harmony_by_ids_obeys_the_law(bounds):
    deltas = by_ids([IDS])[0]
    places = sorted({0, len(IDS), *bounds})
    split = by_ids([IDS[a:b] for a, b in itertools.pairwise(places)])[0]
    assert [(type(d), getattr(d, "text", getattr(d, "fragment", ""))) for d in split] == [
        (type(d), getattr(d, "text", getattr(d, "fragment", ""))) for d in deltas
    ]


def test_harmony_by_ids_begins_where_the_prompt_ends():
    deltas, _ = by_ids([LETTERS.encode("Yes", RETURN)], "<|start|>assistant<|channel|>final<|message|>")
    assert deltas == [ContentDelta("Yes")]


def test_harmony_by_ids_ends_a_broken_character_at_a_mark():
    ids = LETTERS.encode(CHANNEL, "final", MESSAGE, 0xC3, RETURN)
    assert assemble(by_ids([ids])[0]).content == "\ufffd"
    assert assemble(by_ids([[one] for one in ids])[0]).content == "\ufffd"


def test_harmony_without_the_marks_as_ids_reads_text():
    class Plain(Letters):
        def token_to_id(self, spelling: str) -> int | None:
            return None

    parser = HarmonyParser(ParseContext(tokenizer=Plain()), True, True)
    assert parse_all(parser, HARMONY, token_ids=[1]).reasoning == "Hm."
