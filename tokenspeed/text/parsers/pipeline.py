"""One sequence's parsers together: reasoning first, and tool calls only in what is not reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    ParseContext,
    Parser,
    ReasoningDelta,
    ReasoningFormat,
    ToolCallStart,
    ToolFormat,
)


class ParserPipeline:
    """`interface.Parser` over a reasoning parser and a tool parser (None: the first does both, or no calls are read).

    Args:
        inline: reasoning becomes content.
    Attributes:
        num_calls: calls begun so far.
        num_reasoning_tokens: ids of pieces that began or ended in reasoning. Exact when tokens are fed one by one.
    """

    def __init__(self, reasoning: Parser, tools: Parser | None, inline: bool = False) -> None:
        self._inline = inline
        self._reasoning = reasoning
        self._tools = tools
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning.in_reasoning

    @property
    def incomplete(self) -> bool:
        return self._reasoning.incomplete or (self._tools is not None and self._tools.incomplete)

    @property
    def num_whole_calls(self) -> int:
        return (self._reasoning if self._tools is None else self._tools).num_whole_calls

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        was_inside = self.in_reasoning
        deltas = self._through_tools(self._reasoning.feed(text, token_ids))
        if was_inside or self.in_reasoning:
            self.num_reasoning_tokens += len(token_ids)
        return self._counted(deltas)

    def flush(self, finish_reason: str) -> list[Delta]:
        deltas = self._through_tools(self._reasoning.flush(finish_reason))
        if self._tools is not None:
            deltas += self._tools.flush(finish_reason)
        return self._counted(deltas)

    def finish_reason(self, engine_reason: str) -> str:
        """What the API answers, after `flush`: `stop` becomes `tool_calls` if there are calls and all are whole."""
        return "tool_calls" if engine_reason == "stop" and self.num_calls and not self.incomplete else engine_reason

    def _through_tools(self, deltas: list[Delta]) -> list[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta) and self._inline:
                result.append(ContentDelta(delta.text))
            elif isinstance(delta, ContentDelta) and self._tools is not None:
                result += self._tools.feed(delta.text)
            else:
                result.append(delta)
        return result

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        self.num_calls += sum(isinstance(delta, ToolCallStart) for delta in deltas)
        return deltas


def build_pipeline(
    reasoning: ReasoningFormat,
    tools: ToolFormat,
    context: ParseContext,
    *,
    separate_reasoning: bool = True,
    parse_calls: bool = True,
) -> ParserPipeline:
    """Fresh parsers for one sequence.

    Args:
        separate_reasoning: False = reasoning is part of the content, tags included as the model wrote them (for formats
            of channels: without the channel marks). Calls are still read only behind it.
        parse_calls: False = tool calls stay content (`tool_choice` none, or no tools).
    """
    whole = reasoning.whole or tools.whole
    apart = _is_plain(reasoning) or _is_plain(tools)
    if whole is not None and (apart or reasoning.whole is tools.whole):
        separate = separate_reasoning and reasoning.whole is not None
        return ParserPipeline(whole(context, separate, parse_calls and tools.whole is not None), None)
    first = reasoning.make(replace(context, inline_reasoning=not separate_reasoning))
    return ParserPipeline(first, tools.make(context) if parse_calls else None, inline=not separate_reasoning)


def _is_plain(one: ReasoningFormat | ToolFormat) -> bool:
    return "passthrough" in one.names
