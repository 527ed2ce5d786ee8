"""What the parsers of one generated sequence give, and how a format's file describes itself.

A parser takes text as it comes and gives deltas. The law of this room: for every split of the text into pieces, the
deltas joined are the same (`assemble`, and call order against text too). Nothing that the model wrote is lost but the
markup itself: what looks like a call and is none stays content.

Knows nothing of HTTP, of requests or of the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenspeed.text.detokenizer import Decodes


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of this message from 0; its arguments follow as fragments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call `index`: a piece of a JSON text."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallAbandoned:
    """Call `index` has no proper end: it is malformed or was cut. What was given of it is all there is; it is not to be
    executed, even if its arguments happen to be whole."""

    index: int


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallAbandoned


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the request offers. `parameters` is its JSON schema (may be empty)."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


def tool_specs(tools: Iterable[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """From the API's `tools`, wrapped (`{"type": "function", "function": {...}}`) or flat, checked by the server."""
    functions = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools]
    return tuple(ToolSpec(function["name"], function.get("parameters") or {}) for function in functions)


class SpecialTokens(Decodes, Protocol):
    """What a parser that reads token ids needs of `codec.Tokenizer`."""

    def token_to_id(self, spelling: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ParseContext:
    """What a parser may know of its request.

    Fields:
        tools: the functions on offer. A call of any other name is no call, its text stays content. None: every name is
            taken as a call (`/parse/function_call` without tools), and nothing is known of types.
        prompt: the rendered prompt, or as much of its end as holds the open assistant message; None when unknown. Tells
            where in the format the generation begins.
        continued: the text of the message that the generation goes on with; it is the prompt's end, as far as the
            template shows it. None: the generation begins a message.
        thinking: what the request says of thinking (`enable_thinking`, `reasoning_effort`); None = nothing. Only counts
            where the prompt's end does not tell.
        inline_reasoning: the reasoning's deltas hold its tags too, as the model wrote them; the pipeline makes content
            of them, for `separate_reasoning: false`.
        history_calls: tool calls in the request's messages; families that number their calls go on from there.
        tokenizer: lets formats that are defined by token ids (harmony) read them; with None they read spellings.
        hex_digits: n random hexadecimal digits; tests put their own here.
    """

    tools: tuple[ToolSpec, ...] | None = None
    prompt: str | None = None
    continued: str | None = None
    thinking: bool | None = None
    inline_reasoning: bool = False
    history_calls: int = 0
    tokenizer: SpecialTokens | None = None
    hex_digits: Callable[[int], str] = lambda count: secrets.token_hex((count + 1) // 2)[:count]


CallId = Callable[[ParseContext, str, int], str]
"""(context, function name, index in this message) -> the call's id, in the family's form."""


def call_id(context: ParseContext, name: str, index: int) -> str:
    """`call_` and 24 hexadecimal digits: the form of all families that have none of their own."""
    return "call_" + context.hex_digits(24)


class Parser(Protocol):
    """One sequence's parser, for one use."""

    @property
    def in_reasoning(self) -> bool:
        """The next text belongs to the reasoning, as far as is known."""
        ...

    @property
    def incomplete(self) -> bool:
        """A call that was begun has no proper end: cut off or malformed. Certain after `flush`.

        The server must not answer `tool_calls` then.
        """
        ...

    @property
    def num_whole_calls(self) -> int:
        """Calls that have had their end so far."""
        ...

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Take more of the output, give what is certain now. `token_ids`: the ids that `text` came from."""
        ...

    def flush(self, finish_reason: str) -> list[Delta]:
        """The sequence has ended ("stop", "length", ...): give what was held back. No closing is invented."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What `auto` looks at: the HF architecture, and the text of the chat template ("" when there is none)."""

    architecture: str
    template: str

    def missing(self, *marks: str) -> str | None:
        """A reason that names the marks which the template lacks, or None when it has all."""
        absent = [repr(mark) for mark in marks if mark not in self.template]
        return f"the chat template has no {' and no '.join(absent)}" if absent else None


WhyNot = Callable[[ModelTraits], str | None]


def never(traits: ModelTraits) -> str | None:
    """`why_not` of formats that only an explicit name selects."""
    return "it is used only when named"


Starts = Literal["yes", "no", "prompt"]


class WholeFormat(Protocol):
    """A format whose reasoning, answer and calls are channels of one whole: one parser has to read all three.

    Args of the call:
        separate_reasoning: give the reasoning as `ReasoningDelta`, else as content.
        parse_calls: give calls, else their text as content.
    """

    def __call__(self, context: ParseContext, separate_reasoning: bool, parse_calls: bool) -> Parser: ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A file of `reasoning/` in one value.

    Fields:
        names: the flag's value first, then aliases.
        make: context -> parser. Its content deltas are what the tool parser reads.
        why_not: for `auto`: None when this format is the model's, else the reason.
        rank: among those that match, `auto` takes the lowest: the more specific format.
        starts: does the generation begin inside reasoning: "yes", "no", or "prompt": the rendered prompt's end tells
            ("yes" and "no" too give way to a prompt that ends with an open or a closed think tag).
        start_marker: what the model writes when it begins to reason by itself; None: only the prompt decides.
        end_marker: the text that ends the reasoning; a grammar begins behind it. None: there is no such text.
        closing: what closes a reasoning that has taken too long; ends with `end_marker`. None: that alone.
        over_mark: where a reasoning is over whatever comes then, for formats in which that need not be an answer:
            `closing` begins with this mark.
        way_out: further marks that end a reasoning.
        opens_answer: an answer without reasoning begins with `end_marker`, too.
        needs_special_tokens: the text must be decoded with special tokens kept.
        whole: see `WholeFormat`; None for formats that are apart from their tool calls.
    """

    names: tuple[str, ...]
    make: Callable[[ParseContext], Parser]
    why_not: WhyNot = never
    rank: int = 50
    starts: Starts = "no"
    start_marker: str | None = None
    end_marker: str | None = None
    closing: str | None = None
    over_mark: str | None = None
    way_out: tuple[str, ...] = ()
    opens_answer: bool = False
    needs_special_tokens: bool = False
    whole: WholeFormat | None = None


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """How a parameter is spelled that has tags of its own.

    Fields:
        begin: the texts in front of its name, and between name and value (any of them).
        end: the text behind its value.
        next_tags: other texts that end a value, where the model has forgotten `end`; so no value holds one. They begin
            as `end` does.
        line: the value stands on a line of its own.
        by_type: the text between name and value says the value's JSON type: type -> such texts. None: the tool's schema
            alone says it.
        unknown: without `by_type`: what a value is read as of which the schema says no type.
        whole: the texts around a JSON object that may hold all arguments in place of parameters; None: none may.
    """

    begin: tuple[str, tuple[str, ...]]
    end: str
    next_tags: tuple[str, ...]
    line: bool = False
    by_type: Mapping[str, tuple[str, ...]] | None = None
    unknown: Literal["string", "any"] = "string"
    whole: tuple[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """What no value holds: `end`, then the others."""
        return self.end, *self.next_tags


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How a call is spelled: what a grammar needs to hold a model's own calls to schemas.

    Fields:
        trigger: what every call begins with, and nothing else does.
        banned: text that would begin a call some other way, and may not stand outside of calls.
        begin: function name -> the text up to the arguments (up to a running number, when there is one).
        end: the text behind them.
        behind_number: a running number stands behind `begin`, and this text behind it.
        own_id: an id may stand there: the text in front of it, and a regular expression that it matches.
        before_arguments: the text behind all that, in front of the arguments.
        list_key: behind `trigger` there may also be a JSON array of all calls, objects with `name` and, by this key,
            the arguments. None: that is no call.
        section: the texts around the calls of an answer that has nothing else; None: a grammar cannot tell such an
            answer from another.
        separator: the text between two calls.
        parameters: see `ParameterMarks`; None: the arguments are JSON.
    """

    trigger: str
    begin: Callable[[str], str]
    end: str
    behind_number: str | None = None
    own_id: tuple[str, str] | None = None
    before_arguments: str = ""
    list_key: str | None = None
    section: tuple[str, str] | None = ("", "")
    separator: str = ""
    banned: tuple[str, ...] = ()
    parameters: ParameterMarks | None = None


@dataclass(frozen=True, slots=True)
class OpeningMarks:
    """How calls are spelled that an output begins with, where nothing but this beginning tells them from an answer.

    Fields:
        style: a call is a JSON object with name and arguments ("object"), or a Python call with keywords in a list
            ("python").
        tag: text behind which there are calls, too, wherever it stands; None: there is none.
        around: texts that may stand around calls in front; None: there are none.
        arrays: objects may also stand in a JSON array.
    """

    style: Literal["object", "python"]
    tag: str | None = None
    around: tuple[str, str] | None = None
    arrays: bool = False


@dataclass(frozen=True, slots=True)
class MessageMarks:
    """How an output is spelled that is a chain of messages, each a header and a body, with special tokens around: what
    a grammar of the whole output needs.

    Fields:
        specials: the special tokens. Bodies have none of them.
        begin: what every message begins with, but the first, which the prompt has begun.
        end: what stands behind a message that another one follows. An answer or a call is the last of an output.
        reasoning: header of reasoning.
        preamble: header of text for the user in front of a call.
        answer: headers of an answer, any of which may be written.
        call: function name -> headers of a call, any of which may be written.
    """

    specials: tuple[str, ...]
    begin: str
    end: str
    reasoning: str
    preamble: str
    answer: tuple[str, ...]
    call: Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A file of `tools/` in one value; the fields are those of `ReasoningFormat`, and

    Fields:
        ids: the family's form of call ids, for calls that were forced into another format (`tool_choice` required).
        marks: see `CallMarks`; None for formats whose calls have no mark that nothing else has.
        openings: see `OpeningMarks`, for these.
        messages: see `MessageMarks`; None for formats whose output is no chain of messages.
    """

    names: tuple[str, ...]
    make: Callable[[ParseContext], Parser]
    why_not: WhyNot = never
    rank: int = 50
    needs_special_tokens: bool = False
    whole: WholeFormat | None = None
    ids: CallId = call_id
    marks: CallMarks | None = None
    openings: OpeningMarks | None = None
    messages: MessageMarks | None = None


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call, put together. `arguments` is JSON text, unless the call is incomplete."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole output, put together. "" where there was nothing."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def assemble(deltas: Iterable[Delta]) -> Parsed:
    """The one-shot form of a stream of deltas."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                starts.append(delta)
                arguments.append([])
            case ToolCallArguments(index, fragment):
                arguments[index].append(fragment)
    calls = (ParsedCall(start.id, start.name, "".join(parts)) for start, parts in zip(starts, arguments, strict=True))
    return Parsed("".join(reasoning), "".join(content), tuple(calls))


def parse_all(parser: Parser, text: str, finish_reason: str = "stop", token_ids: Sequence[int] = ()) -> Parsed:
    """Parse a finished output with a fresh parser."""
    return assemble([*parser.feed(text, token_ids), *parser.flush(finish_reason)])


@dataclass(frozen=True, slots=True)
class Example:
    """A sample that a format's file carries; the room's tests check it whole, split, cut and mutated.

    Fields:
        text: the output, special tokens spelled out.
        reasoning, content: what it must give.
        calls: (name, arguments as a JSON value) in order.
        prompt: end of the prompt that it follows.
        tools: the functions on offer; None = any.
        finish_reason: how it ended.
        incomplete: the parser must say so; calls are then (name, the arguments' text so far).
    """

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[ToolSpec, ...] | None = None
    finish_reason: str = "stop"
    incomplete: bool = False
