"""What a load consists of: sessions of one or more turns. A single request is a session of one turn.

    prompt of turn k = opening + turn 0 + answer 0 + ... + turn k - 1 + answer k - 1 + turn k

Pieces are token ids or text, of one kind throughout a load; how they travel (prompt, messages) is `http_client`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Piece = str | list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Fields:
        new: what it adds to the conversation.
        output_len: tokens to generate.
    """

    new: Piece
    output_len: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other, each prompt holding the ones before and their answers.

    Fields:
        opening: stands before everything; shared by sessions (a system prompt, a common prefix). None = nothing.
    """

    turns: tuple[Turn, ...]
    opening: Piece | None = None


class Conversation:
    """A session on its way: the prompt that is due, and the answers so far."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answers: list[Piece] = []

    @property
    def due(self) -> Turn | None:
        """The turn whose prompt is due; None when all have been answered."""
        place = len(self._answers)
        return self._session.turns[place] if place < len(self._session.turns) else None

    def prompt(self) -> Piece:
        """The due turn's whole prompt.

        Raises:
            TypeError: pieces of both kinds.
        """
        pieces = [self._session.opening] if self._session.opening is not None else []
        for turn, answer in zip(self._session.turns, self._answers, strict=False):
            pieces += [turn.new, answer]
        due = self.due
        assert due is not None, "every turn has been answered"
        return join([*pieces, due.new])

    def messages(self) -> list[dict[str, str]]:
        """The same as chat messages: the opening is the system's."""
        said = [{"role": "system", "content": _text(self._session.opening)}] if self._session.opening else []
        for turn, answer in zip(self._session.turns, self._answers, strict=False):
            said += [{"role": "user", "content": _text(turn.new)}, {"role": "assistant", "content": _text(answer)}]
        due = self.due
        assert due is not None, "every turn has been answered"
        return [*said, {"role": "user", "content": _text(due.new)}]

    def take(self, answer: Piece) -> None:
        """The due turn has been answered."""
        self._answers.append(answer)


def join(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one kind, one after the other."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return "".join(texts)
    if texts:
        raise TypeError("text and token ids cannot be joined")
    return [token_id for piece in pieces for token_id in piece if isinstance(token_id, int)]


def _text(piece: Piece | None) -> str:
    if not isinstance(piece, str):
        raise TypeError("chat messages are text")
    return piece
