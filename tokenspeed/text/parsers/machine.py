"""Runs a format's grammar over text that comes in pieces.

A grammar is a generator function of a `Cursor` and an `Output`. When it returns, the rest of the text is content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.text.parsers.cursor import Cursor, Steps
from tokenspeed.text.parsers.interface import CallId, Delta, ParseContext, Parser, call_id
from tokenspeed.text.parsers.output import Output

Grammar = Callable[[Cursor, Output], Steps[None]]


class GrammarParser:
    """A tool parser (`interface.Parser`) over one grammar; reads text, not token ids."""

    def __init__(self, grammar: Grammar, output: Output) -> None:
        self.cursor = Cursor()
        self._output = output
        self._run = _whole_text(grammar, self.cursor, output)
        next(self._run)

    @property
    def in_reasoning(self) -> bool:
        return False

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


def _whole_text(grammar: Grammar, cursor: Cursor, output: Output) -> Steps[None]:
    yield  # nothing to read yet
    yield from grammar(cursor, output)
    yield from cursor.rest(output.content)


def grammar_format(
    grammar: Grammar, *, ids: CallId = call_id, trims: bool = True, keeps_ids: bool = False, is_forced: bool = False
) -> Callable[[ParseContext], Parser]:
    """The `make` of a format that is a grammar.

    Args:
        ids: the family's form of call ids.
        trims: whitespace between content and a call is markup, not content.
        keeps_ids, is_forced: see `Output`.
    """
    return lambda context: GrammarParser(grammar, Output(context, ids, trims, keeps_ids, is_forced))
