"""Chat completions on their way out: the wire types of answers, whole and as chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import GenerationEvent, LogprobEntry
from tokenspeed.server.openai.logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, prompt_logprobs
from tokenspeed.server.openai.streaming import StreamRules, encode_json
from tokenspeed.server.openai.usage import Usage
from tokenspeed.server.turn import Turn
from tokenspeed.server.turn_reader import TurnDelta, TurnReader
from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallStart,
    assemble,
)
from tokenspeed.text.parsers.output import join_neighbours


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text; cut off where the choice's finish_reason is not tool_calls."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """A call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. `content` is null when there is nothing but calls; `tool_calls` is there with calls."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `matched_stop` and `stop_reason` are one thing: the stop string or token id that ended it, if any."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class ChatWants:
    """What the request asked for beside the message."""

    logprobs: bool
    token_ids: bool
    prompt_logprobs: bool


@dataclass(slots=True)
class _News:
    """Of one choice: what is not sent yet, or all of it."""

    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    last: TurnDelta | None = None

    def add(self, news: TurnDelta) -> None:
        self.deltas += _shown(news.deltas)
        self.token_ids += news.event.token_ids
        self.logprobs += news.event.logprobs
        self.last = news


class ChatReply:
    """Writes one turn's events as chat chunks or as one chat completion."""

    def __init__(self, request_id: str, config: ServerConfig, turn: Turn, wants: ChatWants) -> None:
        self._id = request_id
        self._model = config.served_model_names[0]
        self._fingerprint = config.weight_version
        self._created = int(time.time())
        self._wants = wants
        self._prompt_token_ids = turn.prompt_token_ids
        self._prompt_logprobs: list[LogprobEntry] = []
        self._reader = turn.reader()
        self._answers = [_News() for _ in range(turn.sampling.n)]

    @property
    def num_reasoning_tokens(self) -> int:
        """So far."""
        return self._reader.num_reasoning_tokens

    def is_done(self) -> bool:
        """Nothing more is wanted of the engine."""
        return self._reader.is_done()

    def writer(self, rules: StreamRules) -> ChatWriter:
        """Writes the same reply as chunks."""
        head = b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"system_fingerprint":%s' % (
            encode_json(self._id),
            self._created,
            encode_json(self._model),
            encode_json(self._fingerprint),
        )
        return ChatWriter(head, self._reader, rules, self._wants, self._prompt_token_ids)

    def note(self, _prompt: int, event: GenerationEvent) -> None:
        """Collect an event for the whole answer."""
        if self._reader.has_ended(event.index):
            return  # others have not
        self._answers[event.index].add(self._reader.read(event))
        self._prompt_logprobs += event.prompt_logprobs

    def whole(self, usage: Usage) -> ChatResponse:
        """The whole answer, after all sequences have ended."""
        unset = msgspec.UNSET
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index) for index in range(len(self._answers))],
            usage=usage,
            system_fingerprint=self._fingerprint,
            prompt_logprobs=prompt_logprobs(self._prompt_logprobs) if self._wants.prompt_logprobs else unset,
            prompt_token_ids=self._prompt_token_ids if self._wants.token_ids else unset,
        )

    def _choice(self, index: int) -> ChatChoice:
        done = self._answers[index]
        assert done.last is not None and done.last.finish_reason is not None
        stop_reason = done.last.event.stop_reason
        return ChatChoice(
            index=index,
            message=_message(done.deltas),
            logprobs=chat_logprobs(done.logprobs) if self._wants.logprobs else None,
            finish_reason=done.last.finish_reason,
            matched_stop=stop_reason,
            stop_reason=stop_reason,
            token_ids=done.token_ids if self._wants.token_ids else msgspec.UNSET,
        )


def _message(deltas: list[Delta]) -> AnswerMessage:
    parsed = assemble(deltas)
    calls = [
        AnswerToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in parsed.calls
    ]
    return AnswerMessage(
        content=None if calls and not parsed.content else parsed.content,
        reasoning_content=parsed.reasoning or None,
        tool_calls=calls or msgspec.UNSET,
    )


class ChatWriter:
    """`streaming.Writer` of chat: role, then reasoning, content and calls as they come, then the finish.

    The common chunk (content only) is built by joining bytes.
    """

    def __init__(
        self, head: bytes, reader: TurnReader, rules: StreamRules, wants: ChatWants, prompt_token_ids: list[int]
    ) -> None:
        self._head = head
        self._reader = reader
        self._rules = rules
        self._wants = wants
        self._prompt_token_ids = prompt_token_ids
        self._choice_heads = [head + b',"choices":[{"index":%d,"delta":{' % index for index in range(rules.n)]
        self._opened: set[int] = set()
        self._pending: dict[int, _News] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        """So far."""
        return self._reader.num_reasoning_tokens

    def write(self, _prompt: int, event: GenerationEvent, tail: Callable[[], bytes]) -> bytes:
        """The event's chunks, often none or one."""
        if self._reader.has_ended(event.index):
            return b""  # others have not
        news = self._reader.read(event)
        end, choice = tail(), event.index
        out = b""
        if choice not in self._opened:
            out = self._open(choice) + end
            self._opened.add(choice)
        if self._rules.is_plain and self._rules.interval <= 1:
            for delta in _shown(news.deltas):
                out += self._chunk(choice, delta) + end
        else:
            out += self._gather(choice, news, end)
        if news.finish_reason is not None:
            stop = encode_json(event.stop_reason)
            out += self._choice_heads[choice] + (
                b'},"logprobs":null,"finish_reason":%s,"matched_stop":%s,"stop_reason":%s}]'
                % (encode_json(news.finish_reason), stop, stop)
            )
            out += end
        return out

    def usage(self) -> bytes:
        """The start of the chunk with no choices."""
        return self._head + b',"choices":[]'

    def _open(self, choice: int) -> bytes:
        """The role chunk; the first of all carries the prompt's ids when asked."""
        head = self._choice_heads[choice]
        if self._wants.token_ids and not self._opened:
            ids = b',"prompt_token_ids":' + encode_json(self._prompt_token_ids)
            head = self._head + ids + head.removeprefix(self._head)
        return head + b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'

    def _chunk(self, choice: int, delta: Delta, extras: bytes = b'"logprobs":null,"finish_reason":null') -> bytes:
        return self._choice_heads[choice] + _delta_json(delta) + b"}," + extras + b"}]"

    def _gather(self, choice: int, news: TurnDelta, end: bytes) -> bytes:
        """Holds news back until a chunk has `interval` tokens."""
        pending = self._pending.setdefault(choice, _News())
        pending.add(news)
        is_full = len(pending.token_ids) >= self._rules.interval or news.finish_reason is not None
        has_news = pending.deltas or (not self._rules.is_plain and pending.token_ids)
        if not (is_full and has_news):
            return b""
        del self._pending[choice]
        out = b""
        first, *rest = join_neighbours(pending.deltas) or [ContentDelta("")]
        logprobs = encode_json(chat_logprobs(pending.logprobs)) if self._wants.logprobs else b"null"
        ids = b',"token_ids":' + encode_json(pending.token_ids) if self._wants.token_ids else b""
        out = self._chunk(choice, first, b'"logprobs":' + logprobs + b',"finish_reason":null' + ids) + end
        for delta in rest:
            out += self._chunk(choice, delta) + end
        return out


def _shown(deltas: list[Delta]) -> list[Delta]:
    """Without what chat has no words for: `finish_reason` says that a call was abandoned."""
    return [delta for delta in deltas if not isinstance(delta, ToolCallAbandoned)]


def _delta_json(delta: Delta) -> bytes:
    """The inside of `delta`."""
    match delta:
        case ContentDelta(text):
            return b'"content":' + encode_json(text)
        case ReasoningDelta(text):
            return b'"reasoning_content":' + encode_json(text)
        case ToolCallStart(index, identity, name):
            return b'"tool_calls":[{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":""}}]' % (
                index,
                encode_json(identity),
                encode_json(name),
            )
        case ToolCallArguments(index, fragment):
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%s}}]' % (index, encode_json(fragment))
        case ToolCallAbandoned():
            raise AssertionError("not shown")
