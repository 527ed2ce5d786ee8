"""Reads a turn's events: each sequence's text through its parsers, with what the API's switches make of the result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tokenspeed.engine.interface import GenerationEvent
from tokenspeed.text.parsers.interface import (
    Delta,
    ParseContext,
    ReasoningDelta,
    ReasoningFormat,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
)
from tokenspeed.text.parsers.pipeline import ParserPipeline, build_pipeline


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """News of one sequence.

    Fields:
        index: the sequence, in [0, n).
        deltas: what its text gave, in order; often nothing.
        event: the engine's event behind it: counts, token ids, logprobs. Its text holds markup.
        finish_reason: on the last one: stop, tool_calls (all calls are whole), length, abort.
    """

    index: int
    deltas: list[Delta]
    event: GenerationEvent
    finish_reason: str | None


@dataclass(slots=True)
class _Choice:
    pipeline: ParserPipeline
    held: list[str] = field(default_factory=list)  # reasoning that comes in one piece
    first_call: list[str] = field(default_factory=list)  # its arguments, when there may be only one
    is_cut: bool = False  # a second call has begun that is not wanted


class TurnReader:
    """Made by `Turn.reader`. Not for two generations.

    Args:
        parses_calls: False = the text of calls stays content.
        one_call: what follows the first call is dropped.
        separate_reasoning, stream_reasoning: see `TurnRequest`.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat,
        tools: ToolFormat,
        parsing: ParseContext,
        *,
        num_choices: int,
        parses_calls: bool,
        one_call: bool,
        separate_reasoning: bool,
        stream_reasoning: bool,
    ) -> None:
        self._one_call = one_call
        self._holds = not stream_reasoning
        self._choices = [
            _Choice(
                build_pipeline(
                    reasoning, tools, parsing, separate_reasoning=separate_reasoning, parse_calls=parses_calls
                )
            )
            for _ in range(num_choices)
        ]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, of all sequences."""
        return sum(choice.pipeline.num_reasoning_tokens for choice in self._choices)

    def read(self, event: GenerationEvent) -> TurnDelta:
        """Take the next event of the generation."""
        choice = self._choices[event.index]
        # A stop token of the request counts, but is no text; those of the model may be marks of its format.
        ids = event.token_ids[:-1] if isinstance(event.stop_reason, int) else event.token_ids
        deltas = choice.pipeline.feed(event.text, ids)
        reason: str | None = event.finish_reason
        if reason is not None:
            deltas = deltas + choice.pipeline.flush(reason)
        if self._one_call:
            deltas = _only_first_call(choice, deltas)
        if self._holds:
            deltas = _whole_reasoning(choice, deltas, reason is not None)
        if reason is not None:
            reason = self._finish_reason(choice, reason)
        return TurnDelta(event.index, deltas, event, reason)

    def _finish_reason(self, choice: _Choice, reason: str) -> str:
        if choice.is_cut and reason in ("stop", "length"):  # the one call was over when the next began
            return "tool_calls" if _is_json("".join(choice.first_call)) else reason
        return choice.pipeline.finish_reason(reason)


def _only_first_call(choice: _Choice, deltas: list[Delta]) -> list[Delta]:
    kept: list[Delta] = []
    for delta in deltas:
        choice.is_cut = choice.is_cut or (isinstance(delta, ToolCallStart) and delta.index > 0)
        if choice.is_cut:
            break
        if isinstance(delta, ToolCallArguments):
            choice.first_call.append(delta.fragment)
        kept.append(delta)
    return kept


def _whole_reasoning(choice: _Choice, deltas: list[Delta], is_last: bool) -> list[Delta]:
    kept: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            choice.held.append(delta.text)
            continue
        _release(choice, kept)
        kept.append(delta)
    if is_last:
        _release(choice, kept)
    return kept


def _release(choice: _Choice, kept: list[Delta]) -> None:
    if choice.held:
        kept.append(ReasoningDelta("".join(choice.held)))
        choice.held.clear()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
