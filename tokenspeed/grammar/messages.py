"""Outputs that are chains of messages (harmony) as grammars: reasoning, text for the user, then an answer or a call.

Special tokens are named by id, so that a body which merely spells a mark goes on, as it does for the format's parser.
No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenspeed.grammar.forms import Form, either, repeated, sequence, text_form
from tokenspeed.grammar.tools import answer_form, arguments_form
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.text.parsers.interface import MessageMarks


def answer_or_call_in_messages(
    answer: GrammarSpec | None,
    tools: Sequence[dict[str, Any]],
    strict: Collection[str],
    marks: MessageMarks,
    token_to_id: Callable[[str], int | None],
) -> GrammarSpec | None:
    """A whole output, from the header of its first message on, or from behind the end of its reasoning: any reasoning,
    then an answer or a call of a tool on offer. Behind the end there is no more reasoning.

    Args:
        answer: what the answer obeys; then no other text for the user is written. None: anything.
        strict: names of the tools whose schemas count; arguments of the others are any object.

    Returns:
        None: `answer` cannot be one of two, or the tokenizer lacks a special token.

    Raises:
        InvalidRequest: parameters that cannot be compiled.
    """
    spell = _Speller.build(marks, token_to_id)
    body = None if spell is None else spell.body if answer is None else answer_form(answer)
    if spell is None or body is None:
        return None
    calls = [
        sequence(spell.any_of(marks.call(name)), arguments_form(tool["function"], name in strict))
        for tool in tools
        for name in [tool["function"]["name"]]
    ]
    last = either([sequence(spell.any_of(marks.answer), body), *calls])
    preambles = [marks.preamble] if answer is None else []

    def before(headers: list[str]) -> Form:
        """Any number of messages with these headers, and the beginning of the next."""
        passed = sequence(spell.any_of(headers), spell.body, spell.text(marks.end + marks.begin))
        return repeated(passed)

    behind = [spell.text(marks.begin), *([before(preambles)] if preambles else []), last]
    form = either([sequence(before([marks.reasoning, *preambles]), last), sequence(*behind)])
    param = "tools" if answer is None else answer.param
    return GrammarSpec(kind="token_tag", text=json.dumps({"type": "structural_tag", "format": form}), param=param)


class _Speller:
    """Text in which special tokens are spelled -> forms in which they are ids."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        self._pattern = re.compile("(" + "|".join(map(re.escape, ids)) + ")")
        self.body: Form = {"type": "any_tokens", "exclude_tokens": sorted(ids.values())}

    @staticmethod
    def build(marks: MessageMarks, token_to_id: Callable[[str], int | None]) -> _Speller | None:
        found = {mark: token_to_id(mark) for mark in marks.specials}
        ids = {mark: token_id for mark, token_id in found.items() if token_id is not None}
        return _Speller(ids) if len(ids) == len(found) else None

    def text(self, text: str) -> Form:
        return sequence(*(self._piece(piece) for piece in self._pattern.split(text) if piece))

    def any_of(self, texts: Sequence[str]) -> Form:
        return either([self.text(text) for text in texts])

    def _piece(self, piece: str) -> Form:
        token_id = self._ids.get(piece)
        return text_form(piece) if token_id is None else {"type": "token", "token": token_id}
