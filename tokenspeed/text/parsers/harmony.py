"""gpt-oss's harmony format: messages with a channel and maybe a recipient; reasoning, answer and calls in one.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>

Source: OpenAI's harmony guide. `analysis` is reasoning; `final`, and `commentary` without recipient (a preamble meant
for the user), are content; a message with a recipient is a call, in whatever channel, and the recipient may stand in
front of or behind the channel. Messages of one kind are a newline apart.

A call that is not wanted or not on offer stays content, markup included. Marks are read by token id where a tokenizer
is given, so that text which merely spells a mark is text; else by spelling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.parsers.cursor import Cursor, Markers, Sink, Steps
from tokenspeed.text.parsers.interface import Delta, ParseContext, SpecialTokens, call_id
from tokenspeed.text.parsers.json_call import give_up, may_begin_arguments
from tokenspeed.text.parsers.output import Output

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
SPELLINGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _RETURN, _CALL)

# What marks are inside the parser when they were read by id: Unicode noncharacters, which real text does not have.
_STAND_INS = tuple(chr(0xFDD0 + index) for index in range(len(SPELLINGS)))
_NO_STAND_INS = {ord(char): "\ufffd" for char in _STAND_INS}

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_NOT_FUNCTIONS = ("assistant", "user", "all")
MAX_HEADER_CHARS = 512
_MAX_HEADER_PARTS = 8


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str | None
    raw: str


class HarmonyParser:
    """`interface.Parser` for the whole output.

    With `context.tokenizer` and token ids fed, `text` is ignored: stop strings must then be looked for in the deltas.
    """

    def __init__(self, context: ParseContext, separate_reasoning: bool, parse_calls: bool) -> None:
        self.cursor = Cursor()
        self.in_reasoning = False
        self._output = Output(context, call_id)
        self._separate = separate_reasoning
        self._parse_calls = parse_calls
        self._ids = _IdReader.build(context.tokenizer)
        alphabet = SPELLINGS if self._ids is None else _STAND_INS
        self._marks = Markers(*alphabet)
        self._spelling = dict(zip(alphabet, SPELLINGS, strict=True))
        self._last_kind: str | None = None
        self._separator = ""
        self._run = self._read()
        next(self._run)
        self._enter_prompt(context.prompt or "", dict(zip(SPELLINGS, alphabet, strict=True)))

    @property
    def incomplete(self) -> bool:
        return self._output.incomplete

    @property
    def num_whole_calls(self) -> int:
        return self._output.num_whole_calls

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        self._advance(text if self._ids is None else self._ids.feed(token_ids))
        return self._output.taken()

    def flush(self, finish_reason: str) -> list[Delta]:
        if self._ids is not None:
            self._advance(self._ids.flush())
        self.cursor.end(cut=finish_reason == "length")
        next(self._run, None)
        self._output.finish(finish_reason)
        return self._output.taken()

    def _advance(self, text: str) -> None:
        if text:
            self.cursor.add(text)
            next(self._run)

    def _enter_prompt(self, prompt: str, marks: dict[str, str]) -> None:
        """Take the header that the prompt's end has begun, without what is already of its body."""
        start = prompt.rfind(_START)
        tail = prompt[start:] if start >= 0 else ""
        if any(mark in tail for mark in (_END, _RETURN, _CALL)):
            return
        if _MESSAGE in tail:
            tail = tail[: tail.index(_MESSAGE) + len(_MESSAGE)]
        for spelling, mark in marks.items():
            tail = tail.replace(spelling, mark)
        self._advance(tail)

    def _read(self) -> Steps[None]:
        yield  # nothing to read yet
        mark: str | None = ""
        while mark is not None:
            header = yield from self._header(mark)
            if header is None:
                return
            mark = yield from self._message(header)

    def _header(self, before: str) -> Steps[_Header | None]:
        """Up to a body. `before`: the mark that ended the last one. None: the text ended."""
        parts: list[tuple[str, str]] = [(before if before in (_START, _CHANNEL) else "", "")]
        while True:
            found = yield from self.cursor.within(self._marks, MAX_HEADER_CHARS)
            if found is None or len(parts) > _MAX_HEADER_PARTS:
                return self._no_header(parts, "" if found is None else found[0] + self._spelling[found[1]])
            parts[-1] = (parts[-1][0], found[0])
            mark = self._spelling[found[1]]
            if mark == _MESSAGE:
                return _parsed(parts)
            if mark in (_CHANNEL, _CONSTRAIN):
                parts.append((mark, ""))
            else:
                parts = [(mark if mark == _START else "", "")]

    def _no_header(self, parts: list[tuple[str, str]], behind: str) -> _Header | None:
        """Text that is not of the format is content; a header cut by the end of the text is dropped."""
        raw = "".join(mark + text for mark, text in parts) + behind
        if self.cursor.ended and raw:
            self.cursor.discard()
            return None
        self._kind("content")
        self._content(raw)
        return _Header("", None, "")

    def _message(self, header: _Header) -> Steps[str | None]:
        """The body; gives the mark that ended it."""
        name = header.recipient
        if name is not None:
            raw = header.raw
            if self._parse_calls and self._output.accepts(name):
                self.cursor.record(raw)
                if (yield from may_begin_arguments(self.cursor, "".join(mark[0] for mark in self._spelling))):
                    self.cursor.recorded()
                    return (yield from self._call(name))
                raw = self.cursor.recorded()
            self._kind("content")
            self._content(raw)
            end = yield from self._body(self._output.content)
            self._output.content(end if end in (_CALL, _END) else "")
            return end
        is_reasoning = header.channel == "analysis" and self._separate
        if header.channel:
            self._kind("reasoning" if is_reasoning else "content")
        self.in_reasoning = is_reasoning
        end = yield from self._body(self._reasoning if is_reasoning else self._content)
        self.in_reasoning = False
        return end

    def _call(self, name: str) -> Steps[str | None]:
        self._output.start(name)
        has_any = (yield from self.cursor.peek()) == "{"
        end = yield from self._body(self._output.arguments, drop_tail=True)
        if end is None:
            give_up(self.cursor, self._output)
        else:
            self._output.arguments("" if has_any else "{}")
            self._output.end()
        return end

    def _body(self, sink: Sink, drop_tail: bool = False) -> Steps[str | None]:
        while True:
            mark = yield from self.cursor.until(self._marks, sink, drop_tail)
            spelled = None if mark is None else self._spelling[mark]
            if spelled not in (_MESSAGE, _CONSTRAIN):
                return spelled
            sink(spelled)

    # A newline between two messages of one kind, once the second has text.

    def _kind(self, kind: str) -> None:
        self._separator = "\n" if self._last_kind == kind else ""
        self._last_kind = kind

    def _reasoning(self, text: str) -> None:
        if text:
            self._output.reasoning(self._separator + text)
            self._separator = ""

    def _content(self, text: str) -> None:
        if text:
            self._output.content(self._separator + text)
            self._separator = ""


class _IdReader:
    """Token ids -> text in which stand-ins are the marks."""

    def __init__(self, tokenizer: SpecialTokens, stand_ins: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._stand_ins = stand_ins
        self._detokenizer = Detokenizer(tokenizer, continues=True)

    @staticmethod
    def build(tokenizer: SpecialTokens | None) -> _IdReader | None:
        """None without a tokenizer that has every mark as a special token."""
        if tokenizer is None:
            return None
        ids = [tokenizer.token_to_id(spelling) for spelling in SPELLINGS]
        known = {token_id: mark for token_id, mark in zip(ids, _STAND_INS, strict=True) if token_id is not None}
        return _IdReader(tokenizer, known) if len(known) == len(SPELLINGS) else None

    def feed(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            mark = self._stand_ins.get(token_id)
            if mark is None:
                parts.append(self._detokenizer.feed((token_id,)).translate(_NO_STAND_INS))
            else:
                parts += (self.flush(), mark)
                self._detokenizer = Detokenizer(self._tokenizer, continues=True)
        return "".join(parts)

    def flush(self) -> str:
        return self._detokenizer.flush().translate(_NO_STAND_INS)


def _parsed(parts: list[tuple[str, str]]) -> _Header:
    channel = ""
    recipient: str | None = None
    for mark, text in parts:
        found = _RECIPIENT.search(text)
        if found is not None and found[1] not in _NOT_FUNCTIONS:
            recipient = found[1].removeprefix("functions.")
        if mark == _CHANNEL:
            channel = (text.split() or [""])[0]
    return _Header(channel or "final", recipient, "".join(mark + text for mark, text in parts) + _MESSAGE)
