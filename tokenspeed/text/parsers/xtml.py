"""Kimi K3's XTML: elements whose brackets are special tokens; reasoning, answer and calls are channels of one message.

    <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
        <|open|>argument key="k" type="string"<|sep|>raw text<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>

Source: the encoding published with the weights, as several public engines document it. Strings are raw, other types are
JSON; attributes are escaped (`&amp;`, `&quot;`); a call may hold one `json` element in place of arguments. The prompt
opens `think` or `response`. Text outside of channels is content, whitespace between elements is markup. What is no call
on offer stays content, tags included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from tokenspeed.text.parsers.cursor import Cursor, Markers, Steps
from tokenspeed.text.parsers.interface import CallMarks, Delta, ParameterMarks, ParseContext
from tokenspeed.text.parsers.json_call import MAX_NAME_CHARS, give_up, marked_arguments, may_begin_arguments
from tokenspeed.text.parsers.output import Output
from tokenspeed.text.parsers.typed_arguments import ANY, NOT_STRING, STRING, Kind, Kinds, ObjectWriter, ValueEnd

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_EDGES = Markers(_OPEN, _CLOSE, _END)
_SEPARATOR = Markers(_SEP)
_CALL_END = f"{_CLOSE}call{_SEP}"
_ARGUMENT_END = ValueEnd(f"{_CLOSE}argument{_SEP}", f"{_OPEN}argument", _CALL_END)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CHANNELS = ("think", "response", "tools")
_CHANNEL_EDGE = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})({'|'.join(_CHANNELS)}){re.escape(_SEP)}")
THINK_END = f"{_CLOSE}think{_SEP}"
_SPACES = " \n\r\t"  # that may stand in a bracket, in front of the element's name or behind all
_TYPES = {kind: (kind,) for kind in get_args(Kind)} | {"integer": ("number", "integer")}

CALLS = CallMarks(
    f"{_OPEN}call",
    lambda name: f'{_OPEN}call tool="{name}" index="',
    _CALL_END,
    behind_number=f'"{_SEP}',
    section=None,
    banned=tuple(_OPEN + space for space in _SPACES),
    parameters=ParameterMarks(
        (f'{_OPEN}argument key="', ()),
        _ARGUMENT_END.own,
        _ARGUMENT_END.next_tags,
        by_type={kind: tuple(f'" type="{name}"{_SEP}' for name in names) for kind, names in _TYPES.items()},
        whole=(f'{_OPEN}json type="object"{_SEP}', f"{_CLOSE}json{_SEP}"),
    ),
)
"""Attributes in the order of the published encoding, arguments one by one."""


def xtml_id(context: ParseContext, name: str, index: int) -> str:
    """`NAME:N`."""
    # Counted over the conversation: counted by message, the same call in two turns would have one id.
    return f"{name}:{context.history_calls + index}"


class XtmlParser:
    """`interface.Parser` for the whole output."""

    def __init__(self, context: ParseContext, separate_reasoning: bool, parse_calls: bool) -> None:
        self.cursor = Cursor()
        self._output = Output(context, xtml_id)
        self._separate = separate_reasoning
        self._parse_calls = parse_calls
        self._channel = _prompt_channel(context)
        self._run = self._read()
        next(self._run)

    @property
    def in_reasoning(self) -> bool:
        return self._channel == "think" and self._separate

    @property
    def incomplete(self) -> bool:
        return self._output.incomplete

    @property
    def num_whole_calls(self) -> int:
        return self._output.num_whole_calls

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        if text:
            self.cursor.add(text)
            next(self._run)
        return self._output.taken()

    def flush(self, finish_reason: str) -> list[Delta]:
        self.cursor.end(cut=finish_reason == "length")
        next(self._run, None)
        self._output.finish(finish_reason)
        return self._output.taken()

    def _read(self) -> Steps[None]:
        yield  # nothing to read yet
        while (edge := (yield from self.cursor.until(_EDGES, self._text))) is not None:
            if edge == _END:
                self._channel = None
                continue
            self.cursor.record(edge)
            found = yield from self.cursor.within(_SEPARATOR, MAX_NAME_CHARS)
            raw = self.cursor.recorded()
            if found is None and self.cursor.cut:  # brackets are no text: what begins behind one is markup
                self.cursor.discard()
                if self._channel == "tools":
                    self._output.cut()
                return
            tag, _, attributes = ("" if found is None else found[0].strip(_SPACES)).partition(" ")
            if edge == _OPEN and tag == "call" and self._channel == "tools":
                yield from self._call(raw, _attributes(attributes))
            elif edge == _OPEN and tag in (*_CHANNELS, "message"):
                self._channel = tag if tag in _CHANNELS else None
            elif edge == _CLOSE and tag in (*_CHANNELS, "message"):
                self._channel = None
            else:
                self._text(raw)
                continue
            if self._channel not in ("think", "response"):
                yield from self.cursor.space()

    def _text(self, text: str) -> None:
        (self._output.reasoning if self.in_reasoning else self._output.content)(text)

    def _call(self, raw: str, attributes: dict[str, str]) -> Steps[None]:
        name = attributes.get("tool", "")
        if not self._parse_calls or not self._output.accepts(name):
            self._text(raw)
            return
        writer = ObjectWriter(self._output)
        cursor = self.cursor
        cursor.record(raw)
        is_first = True
        yield from cursor.space()
        while (yield from cursor.literal(_OPEN)):
            found = yield from cursor.within(_SEPARATOR, MAX_NAME_CHARS)
            tag, _, rest = ("" if found is None else found[0].strip(_SPACES)).partition(" ")
            inner = _attributes(rest)
            if is_first and tag == "json" and not (yield from may_begin_arguments(cursor)):
                self._text(cursor.recorded())
                return
            if is_first:
                cursor.recorded()
                self._output.start(name)
                if tag == "json":
                    yield from self._json_call()
                    return
            is_first = False
            if tag != "argument" or "key" not in inner:
                give_up(cursor, self._output)
                return
            if not (yield from writer.member(cursor, inner["key"], _kinds(inner.get("type")), _ARGUMENT_END)):
                return
            yield from cursor.space()
        if is_first:
            cursor.recorded()
            self._output.start(name)
        if (yield from cursor.literal(_CALL_END)):
            writer.close()
        else:
            give_up(cursor, self._output)

    def _json_call(self) -> Steps[None]:
        yield from marked_arguments(self.cursor, self._output, f"{_CLOSE}json{_SEP}")
        yield from self.cursor.space()
        yield from self.cursor.literal(_CALL_END)


def _attributes(text: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}


def _kinds(declared: str | None) -> Kinds:
    if declared is None or declared == "string":
        return STRING
    kinds: dict[str, Kind] = {kind: kind for kind in ANY}
    return frozenset((kinds[declared],)) if declared in kinds else NOT_STRING


def _prompt_channel(context: ParseContext) -> str | None:
    prompt = (context.prompt or "").rstrip()
    if context.continued:
        edges = _CHANNEL_EDGE.findall(prompt, max(0, prompt.rfind(f"{_OPEN}message")))
        return edges[-1][1] if edges and edges[-1][0] == _OPEN else None
    return next((name for name in ("think", "response") if prompt.endswith(f"{_OPEN}{name}{_SEP}")), None)
