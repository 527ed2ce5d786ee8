"""One sequence's parsers together: reasoning first, and tool calls only in what is not reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.parsers.interface import (
    ContentDelta,
    Delta,
    ParseContext,
    Parser,
    ReasoningDelta,
    ReasoningFormat,
    SpecialTokens,
    ToolCallStart,
    ToolFormat,
)
from tokenspeed.text.parsers.output import join_neighbours


class ParserPipeline:
    """`interface.Parser` over a reasoning parser and a tool parser (None: the first does both, or no calls are read).

    Args:
        inline: reasoning becomes content.
        pieces: cuts what is fed where reasoning may begin or end; None: it is fed whole.
    Attributes:
        num_calls: calls begun so far.
        num_reasoning_tokens: ids of pieces that began or ended in reasoning. Without `pieces` it is exact when tokens
            are fed one by one.
    """

    def __init__(
        self, reasoning: Parser, tools: Parser | None, inline: bool = False, pieces: Pieces | None = None
    ) -> None:
        self._inline = inline
        self._pieces = pieces
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
        if self._pieces is None or len(token_ids) < 2:
            return self._counted(self._feed(text, token_ids))
        deltas: list[Delta] = []
        for piece, ids in self._pieces.cut(text, token_ids):
            deltas += self._feed(piece, ids)
        return self._counted(join_neighbours(deltas))

    def _feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        was_inside = self.in_reasoning
        deltas = self._through_tools(self._reasoning.feed(text, token_ids))
        if was_inside or self.in_reasoning:
            self.num_reasoning_tokens += len(token_ids)
        return deltas

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


class Pieces:
    """Where tokens that come together are cut, so that those of reasoning can be counted: around the tokens that are
    marks of the format, or around every token where a mark is more than one."""

    def __init__(self, reasoning: ReasoningFormat, tokenizer: SpecialTokens, skips_special_tokens: bool) -> None:
        spelled = [mark for mark in (reasoning.start_marker, reasoning.end_marker) if mark is not None]
        ids = [tokenizer.token_to_id(mark) for mark in spelled]
        known = {token_id for token_id in ids if token_id is not None}
        if reasoning.whole is not None:
            known |= tokenizer.special_ids
        self._edges = None if reasoning.whole is None and None in ids else known
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens

    def cut(self, text: str, token_ids: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        """Neighbouring parts of both. The text may be short of the ids, or have some of ids before."""
        begin = 0
        decoder = Detokenizer(self._tokenizer, self._skips, continues=True)
        while begin < len(token_ids):
            end = self._end(token_ids, begin)
            ids = token_ids[begin:end]
            is_last = end == len(token_ids)
            length = len(text) if is_last else len(decoder.feed(ids))
            yield text[:length], ids
            text, begin = text[length:], end

    def _end(self, token_ids: Sequence[int], begin: int) -> int:
        edges = self._edges
        if edges is None or token_ids[begin] in edges:
            return begin + 1
        return next((place for place in range(begin, len(token_ids)) if token_ids[place] in edges), len(token_ids))


def build_pipeline(
    reasoning: ReasoningFormat,
    tools: ToolFormat,
    context: ParseContext,
    *,
    separate_reasoning: bool = True,
    parse_calls: bool = True,
    counting: SpecialTokens | None = None,
    skips_special_tokens: bool = True,
) -> ParserPipeline:
    """Fresh parsers for one sequence.

    Args:
        separate_reasoning: False = reasoning is part of the content, tags included as the model wrote them (for formats
            of channels: without the channel marks). Calls are still read only behind it.
        parse_calls: False = tool calls stay content (`tool_choice` none, or no tools).
        counting: the tokenizer of the ids that are fed, to count those of reasoning exactly.
        skips_special_tokens: the text that is fed has none of them.
    """
    has_marks = reasoning.start_marker is not None or reasoning.end_marker is not None
    pieces = Pieces(reasoning, counting, skips_special_tokens) if counting is not None and has_marks else None
    whole = reasoning.whole or tools.whole
    apart = _is_plain(reasoning) or _is_plain(tools)
    if whole is not None and (apart or reasoning.whole is tools.whole):
        separate = separate_reasoning and reasoning.whole is not None
        return ParserPipeline(whole(context, separate, parse_calls and tools.whole is not None), None, pieces=pieces)
    first = reasoning.make(replace(context, inline_reasoning=not separate_reasoning))
    return ParserPipeline(first, tools.make(context) if parse_calls else None, not separate_reasoning, pieces)


def _is_plain(one: ReasoningFormat | ToolFormat) -> bool:
    return "passthrough" in one.names
