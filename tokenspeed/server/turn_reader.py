"""Reads a turn's events: each sequence's text through its parsers, with what the API's switches make of the result."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.engine.interface import GenerationEvent
from tokenspeed.text.parsers.interface import (
    Delta,
    ParseContext,
    ReasoningDelta,
    ReasoningFormat,
    SpecialTokens,
    ToolCallAbandoned,
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
    has_call: bool = False
    is_abandoned: bool = False  # the first call
    has_ended: bool = False  # by itself, or because nothing more is wanted of it


class TurnReader:
    """Made by `Turn.reader`. Not for two generations.

    Args:
        parses_calls: False = the text of calls stays content.
        one_call: a sequence ends behind its first call.
        separate_reasoning, stream_reasoning: see `TurnRequest`.
        counting, skips_special_tokens: see `build_pipeline`.
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
        counting: SpecialTokens,
        skips_special_tokens: bool,
    ) -> None:
        self._one_call = one_call
        self._holds = not stream_reasoning
        self._choices = [
            _Choice(
                build_pipeline(
                    reasoning,
                    tools,
                    parsing,
                    separate_reasoning=separate_reasoning,
                    parse_calls=parses_calls,
                    counting=counting,
                    skips_special_tokens=skips_special_tokens,
                )
            )
            for _ in range(num_choices)
        ]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, of all sequences."""
        return sum(choice.pipeline.num_reasoning_tokens for choice in self._choices)

    def is_done(self) -> bool:
        """All sequences have ended; the engine may still be generating what nobody wants."""
        return all(choice.has_ended for choice in self._choices)

    def has_ended(self, index: int) -> bool:
        """No event of this sequence is wanted any more."""
        return self._choices[index].has_ended

    def read(self, event: GenerationEvent) -> TurnDelta:
        """Take the next event of the generation, of a sequence that has not ended."""
        choice = self._choices[event.index]
        # A stop token of the request counts, but is no text; those of the model may be marks of its format.
        ids = event.token_ids[:-1] if isinstance(event.stop_reason, int) else event.token_ids
        deltas = choice.pipeline.feed(event.text, ids)
        reason: str | None = event.finish_reason
        if reason is not None:
            deltas = deltas + choice.pipeline.flush(reason)
        if reason is not None:
            reason = choice.pipeline.finish_reason(reason)
        if self._one_call:
            deltas, reason = _until_first_call(choice, deltas, reason)
        if self._holds:
            deltas = _whole_reasoning(choice, deltas, reason is not None)
        choice.has_ended = reason is not None
        return TurnDelta(event.index, deltas, event, reason)


def _until_first_call(choice: _Choice, deltas: list[Delta], reason: str | None) -> tuple[list[Delta], str | None]:
    """The deltas up to the end of the first call, and the reason with which the sequence ends there. Behind a malformed
    call, its text goes on up to the next."""
    choice.is_abandoned |= ToolCallAbandoned(0) in deltas
    is_whole = choice.pipeline.num_whole_calls > 0 and not choice.is_abandoned
    kept: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            if choice.has_call:
                break
            choice.has_call = True
        elif is_whole and choice.has_call and not isinstance(delta, ToolCallArguments):
            break
        kept.append(delta)
    if reason in ("abort", "error"):
        return kept, reason
    return kept, "tool_calls" if is_whole else reason or ("stop" if len(kept) < len(deltas) else None)


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
