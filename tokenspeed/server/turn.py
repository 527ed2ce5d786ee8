"""One assistant turn, whatever API asks for it: from a conversation, tools and switches to what the engine generates,
and how its text is read. Knows no wire format.

    TurnRequest -> prepare_turn -> Turn -> Turn.generation -> context.generate -> TurnReader.read -> TurnDelta

May be added here: another switch that a chat template or a parser understands. Not here: fields of an API, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from tokenspeed.engine.interface import GenerationRequest
from tokenspeed.grammar.messages import answer_or_call_in_messages
from tokenspeed.grammar.tools import answer_or_calls, strict_calls, tool_choice_schema
from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams, ThinkingBudget
from tokenspeed.server.context import ServerContext, check_off_loop
from tokenspeed.server.rendering import Conversation, num_chars, render
from tokenspeed.server.turn_reader import TurnReader
from tokenspeed.text.messages import joined
from tokenspeed.text.parsers.interface import (
    ParseContext,
    ReasoningFormat,
    SpecialTokens,
    ToolFormat,
    tool_specs,
)
from tokenspeed.text.parsers.tools.bare_json import forced_calls

TOGGLES = ("enable_thinking", "thinking")
"""The variables by which chat templates turn thinking on and off."""

_OFF_EFFORTS = ("none", "minimal")

# The prompt's end that parsers read: the beginning of an assistant message, or all of one that goes on.
_TAIL_TOKENS = 64
_CONTINUED_TAIL_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tools are called.

    Fields:
        mode: "none", "auto" (the model decides) or "required" (at least one call and nothing else).
        name: with "required": the one function to call, once.
        allowed: names that may be called; None = all.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What an API asks for, in neutral words.

    Fields:
        conversation: what the template sees; all tools are in it, whatever the choice.
        choice: see `ToolChoice`; not looked at without tools.
        parallel_tool_calls: False = at most one call a turn.
        thinking: turn reasoning on or off where the template can; None = say nothing.
        reasoning_effort: none and minimal turn thinking off where the template has a variable for that, the others turn
            it on there; templates read it as `reasoning_effort`. `template_kwargs` win over both.
        thinking_budget: tokens of reasoning after which it is closed; None = as many as the model wants.
        separate_reasoning: False = reasoning is part of the content, tags included.
        stream_reasoning: False = reasoning comes in one piece, when it has ended.
        grammar: what the answer has to obey, or its text when it calls tools instead; starts behind the reasoning.
        yields_to_tools: forced calls take the place of `grammar`.
        strict_tools: names of the tools whose calls have to obey their schemas although the model decides about them.
        other_choices: what this API calls the values of `tool_choice` that work with every model, for an error.
    """

    conversation: Conversation
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    grammar: GrammarSpec | None = None
    yields_to_tools: bool = False
    strict_tools: frozenset[str] = frozenset()
    other_choices: str = "'none', 'required' or a function"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that can be generated.

    Fields:
        prompt_token_ids: the prompt.
        sampling: the caller's, with what the formats need.
        grammar: what the output has to obey, and behind which tokens.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None
    _reasoning: ReasoningFormat
    _tools: ToolFormat
    _parsing: ParseContext
    _tokenizer: SpecialTokens
    _parses_calls: bool
    _request: TurnRequest

    def generation(self, request_id: str, priority: int = 0, cache_salt: str | None = None) -> GenerationRequest:
        """What `context.generate` takes."""
        return GenerationRequest(request_id, self.prompt_token_ids, self.sampling, priority, cache_salt, self.grammar)

    def reader(self) -> TurnReader:
        """Fresh parsers for all sequences of one generation."""
        return TurnReader(
            self._reasoning,
            self._tools,
            self._parsing,
            num_choices=self.sampling.n,
            parses_calls=self._parses_calls,
            one_call=not self._request.parallel_tool_calls,
            separate_reasoning=self._request.separate_reasoning,
            stream_reasoning=self._request.stream_reasoning,
            counting=self._tokenizer,
            skips_special_tokens=self.sampling.skip_special_tokens,
        )


async def prepare_turn(context: ServerContext, request: TurnRequest, sampling: SamplingParams) -> Turn:
    """Render the prompt and choose the parsers.

    Raises:
        InvalidRequest: what cannot be rendered, forced or read; names the field.
    """
    talk, formats = request.conversation, context.formats
    offered = _offered(talk.tools, request.choice)
    forced = bool(offered) and request.choice.mode == "required"
    is_strict = request.grammar is not None or bool(request.strict_tools)
    # Hundreds of long schemas take seconds to check.
    size = num_chars(offered) if forced or is_strict else 0
    grammar = await check_off_loop(size, _grammar, context, request, offered)
    prompt, thinking = await _rendered(context, request, must_fit=True)

    parses_calls = bool(offered) and request.choice.mode != "none"
    tool_format = forced_calls(formats.tools.ids) if forced else formats.tools
    needs_special = formats.reasoning.needs_special_tokens or (parses_calls and tool_format.needs_special_tokens)
    if needs_special:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    tokenizer = context.client.tokenizer
    # Stop strings end the text; a parser that reads ids would read on behind them.
    parsing = _parse_context(context, request, prompt, thinking, offered, reads_ids=not sampling.stop)
    is_whole = grammar is not None and grammar.kind == "token_tag"
    if is_whole and _is_behind(formats.reasoning, parsing, talk.continue_final_message):
        grammar, is_whole = request.grammar, False  # an answer has been begun: it is no call
    start = _start(context, request, parsing, forced, constrained=grammar is not None, is_whole=is_whole)
    if start is not None:
        if start.opens:
            prompt = prompt + tokenizer.encode(start.opens, False, True)
            parsing = replace(parsing, prompt=(parsing.prompt or "") + start.opens)
        after = tuple(tokenizer.encode(start.ends, False, True)) if start.ends else None
        text = start.ends if is_whole else formats.reasoning.closing or start.ends
        closing = tuple(tokenizer.encode(text, False, True))
        over_at, way_out = _marks_out(formats.reasoning, tokenizer)
        if grammar is not None:
            grammar = msgspec.structs.replace(grammar, starts_after=after)
            if after is not None and over_at is not None:
                bridge = () if is_whole else closing
                grammar = msgspec.structs.replace(grammar, bridge=bridge, withheld=way_out)
        if request.thinking_budget is not None and after is not None:
            budget = ThinkingBudget(request.thinking_budget, after, closing, over_at)
            sampling = msgspec.structs.replace(sampling, thinking=budget)
    return Turn(prompt, sampling, grammar, formats.reasoning, tool_format, parsing, tokenizer, parses_calls, request)


async def count_prompt(context: ServerContext, request: TurnRequest) -> int:
    """How many tokens the turn's prompt has. What only generating needs (schemas, a format of calls) is not looked at.

    Raises:
        InvalidRequest: what cannot be rendered; names the field.
    """
    choice, answer = request.choice, request.grammar
    offered = _offered(request.conversation.tools, choice)
    prompt, thinking = await _rendered(context, request, must_fit=False)
    parsing = _parse_context(context, request, prompt, thinking, (), reads_ids=True)
    forced = bool(offered) and choice.mode == "required"
    decides = bool(offered) and choice.mode == "auto"
    has_strict = decides and any(tool["function"]["name"] in request.strict_tools for tool in offered)
    is_whole = decides and context.formats.tools.messages is not None and (answer is not None or has_strict)
    if is_whole and _is_behind(context.formats.reasoning, parsing, request.conversation.continue_final_message):
        is_whole = has_strict = False
    constrained = forced or answer is not None or has_strict
    start = _start(context, request, parsing, forced, constrained=constrained, is_whole=is_whole)
    opens = "" if start is None else start.opens
    return len(prompt) + (len(context.client.tokenizer.encode(opens, False, True)) if opens else 0)


async def _rendered(context: ServerContext, request: TurnRequest, must_fit: bool) -> tuple[list[int], bool | None]:
    """The conversation's prompt, and what the template's variables say of thinking."""
    kwargs, thinking = template_switches(request, context.client.template_variables)
    return await render(context, replace(request.conversation, template_kwargs=kwargs), must_fit), thinking


def _parse_context(
    context: ServerContext,
    request: TurnRequest,
    prompt: list[int],
    thinking: bool | None,
    offered: Sequence[Mapping[str, Any]],
    reads_ids: bool,
) -> ParseContext:
    talk, tokenizer = request.conversation, context.client.tokenizer
    continued = joined(talk.messages[-1]["content"]) if talk.continue_final_message else None
    tail = _TAIL_TOKENS if continued is None else max(_CONTINUED_TAIL_TOKENS, len(continued.encode()) + _TAIL_TOKENS)
    return ParseContext(
        tools=tool_specs(offered),
        prompt=tokenizer.decode(prompt[-tail:], skip_special_tokens=False),
        continued=continued,
        thinking=thinking,
        history_calls=sum(len(message.get("tool_calls") or ()) for message in talk.messages),
        tokenizer=tokenizer if reads_ids else None,
    )


def template_switches(request: TurnRequest, variables: frozenset[str]) -> tuple[dict[str, Any], bool | None]:
    """The template's variables, and what they say of thinking (None = nothing).

    Args:
        variables: those that the chat template reads.
    """
    kwargs = dict(request.conversation.template_kwargs)
    effort, wish = request.reasoning_effort, request.thinking
    if wish is None and effort is not None:
        wish = effort not in _OFF_EFFORTS
    toggles = [name for name in TOGGLES if name in variables]
    if wish is not None and not kwargs.keys() & set(TOGGLES):
        kwargs.update(dict.fromkeys(toggles, wish))
    if effort is not None and not (toggles and effort in _OFF_EFFORTS):
        kwargs.setdefault("reasoning_effort", effort)
    said = next((kwargs[name] for name in TOGGLES if isinstance(kwargs.get(name), bool)), None)
    return kwargs, said


def _offered(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """The tools that may be called."""
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    wanted = {choice.name} if choice.name is not None else choice.allowed
    if wanted is None:
        return [dict(tool) for tool in tools]
    for name in sorted(wanted):
        if name not in names:
            known = ", ".join(map(repr, names)) or "none"
            said = f"tool_choice names {echo(name)}, which is not among tools: {known}"
            raise InvalidRequest(said, param="tool_choice")
    if choice.mode == "required" and not wanted:
        raise InvalidRequest(
            "tool_choice asks for a call, but its allowed_tools names no tool; name one, or send mode 'auto'",
            param="tool_choice",
        )
    return [dict(tool) for tool in tools if tool["function"]["name"] in wanted]


def _grammar(context: ServerContext, request: TurnRequest, offered: list[dict[str, Any]]) -> GrammarSpec | None:
    mode, answer = request.choice.mode if offered else "none", request.grammar
    if mode == "none":
        return answer
    if mode == "required":
        if answer is not None and not request.yields_to_tools:
            raise _no_room(answer, mode)
        return tool_choice_schema(offered, request.choice.name, request.parallel_tool_calls, request.strict_tools)
    if not context.formats.knows_calls:
        raise InvalidRequest(
            "tools cannot be used with tool_choice 'auto': no format of tool calls is known for "
            f"{context.client.model_config.architecture} and its chat template; send tool_choice "
            f"{request.other_choices}, or start the server with --chat-template chatml-tools (for a model that was "
            "trained on ChatML; it shows the tools), or with --tool-call-parser",
            param="tools",
            code="unsupported_field",
        )
    has_strict = any(tool["function"]["name"] in request.strict_tools for tool in offered)
    if has_strict:
        _check_strict(context)
    messages = context.formats.tools.messages if "token_tag" in context.client.grammar_kinds else None
    if messages is not None and (answer is not None or has_strict):
        token_to_id = context.client.tokenizer.token_to_id
        whole = answer_or_call_in_messages(answer, offered, request.strict_tools, messages, token_to_id)
        if whole is None and answer is not None:
            raise _no_room(answer, mode)
        return whole
    marks = context.formats.tools.marks if "structural_tag" in context.client.grammar_kinds else None
    if answer is not None:
        both = None
        if marks is not None:
            both = answer_or_calls(answer, offered, request.strict_tools, marks, request.parallel_tool_calls)
        if both is None:
            raise _no_room(answer, mode)
        return both
    spelled = marks or context.formats.tools.openings
    if spelled is not None and has_strict:
        return strict_calls(offered, request.strict_tools, spelled)
    return None


def _check_strict(context: ServerContext) -> None:
    """Whether a grammar can hold the model's own calls here.

    Raises:
        InvalidRequest: says why not, and what would.
    """
    tools, kinds, reason = context.formats.tools, context.client.grammar_kinds, None
    if tools.marks is None and tools.openings is None and tools.messages is None:
        reason = f"the calls of --tool-call-parser {tools.names[0]} are any text; name the model's own format there"
    elif ("structural_tag" if tools.messages is None else "token_tag") not in kinds:
        reason = "it needs --grammar-backend xgrammar, which this server does not run with"
    elif tools.messages is not None:
        ids = map(context.client.tokenizer.token_to_id, tools.messages.specials)
        if None in ids:
            reason = f"the tokenizer lacks special tokens of the format {tools.names[0]}"
    if reason is not None:
        raise InvalidRequest(
            f"strict: true in a tool cannot be held with tool_choice 'auto': {reason}. Or leave strict out",
            param="tools",
            code="unsupported_field",
        )


def _no_room(answer: GrammarSpec, mode: str) -> InvalidRequest:
    return InvalidRequest(
        f"{answer.param} constrains the whole answer, which leaves no room for the tool calls that tool_choice "
        f"{mode!r} allows; send tool_choice 'none', or leave {answer.param} out",
        param=answer.param,
    )


@dataclass(frozen=True, slots=True)
class _ConstraintStart:
    """Where a constraint starts.

    Fields:
        ends: the text behind which it starts; "" = at once.
        opens: text that the prompt needs first.
    """

    ends: str = ""
    opens: str = ""


def _start(
    context: ServerContext,
    request: TurnRequest,
    parsing: ParseContext,
    forced: bool,
    *,
    constrained: bool,
    is_whole: bool,
) -> _ConstraintStart | None:
    """Where the constraint and the thinking's budget start; None where there is nothing to wait for.

    Args:
        forced: a call is.
        constrained: there is a grammar. is_whole: of all messages.
    """
    formats, continues = context.formats, request.conversation.continue_final_message
    # Free text with strict calls, and a whole output, may hold the reasoning, too; an answer's beginning does not.
    of_answer = forced or request.grammar is not None or formats.tools.openings is not None
    waits = constrained and not is_whole and of_answer
    has_budget = request.thinking_budget is not None
    if not (waits or is_whole or has_budget):
        return None
    start = _constraint_start(formats.reasoning, parsing, continues, waits)
    return _whole_start(start, formats.reasoning, opens=has_budget) if is_whole else start


def _marks_out(reasoning: ReasoningFormat, tokenizer: SpecialTokens) -> tuple[int | None, tuple[int, ...]]:
    """The ids of a format's `over_mark` and `way_out`; None and () where they are no tokens."""
    over_at = None if reasoning.over_mark is None else tokenizer.token_to_id(reasoning.over_mark)
    if over_at is None:
        return None, ()
    others = [tokenizer.token_to_id(mark) for mark in reasoning.way_out]
    return over_at, tuple(token_id for token_id in others if token_id is not None)


def _is_behind(reasoning: ReasoningFormat, parsing: ParseContext, continues: bool) -> bool:
    """The prompt's end is in an answer."""
    end = reasoning.end_marker
    begun = continues or (end is not None and (parsing.prompt or "").rstrip().endswith(end))
    return begun and not reasoning.make(parsing).in_reasoning


def _whole_start(start: _ConstraintStart, reasoning: ReasoningFormat, opens: bool) -> _ConstraintStart:
    """Where a constraint of all messages starts: with the first, or behind the one that the prompt has begun.

    Args:
        start: where one of the answer alone would.
        opens: the prompt may open the reasoning.
    """
    if not start.ends or (start.opens and not opens) or reasoning.over_mark is None:
        return _ConstraintStart()
    return _ConstraintStart(reasoning.over_mark, start.opens)


def _constraint_start(
    reasoning: ReasoningFormat, parsing: ParseContext, continues: bool, waits: bool
) -> _ConstraintStart:
    """A model that may or may not reason would leave it open whether the constraint ever starts, so the prompt
    opens the reasoning that the model was about to open itself."""
    end = reasoning.end_marker
    if end is None:
        return _ConstraintStart()
    if reasoning.make(parsing).in_reasoning:
        return _ConstraintStart(end)
    if _is_behind(reasoning, parsing, continues) or reasoning.start_marker is None:
        return _ConstraintStart()
    if parsing.thinking is False:
        return _ConstraintStart(opens=end if waits and reasoning.opens_answer else "")
    return _ConstraintStart(end, reasoning.start_marker)
