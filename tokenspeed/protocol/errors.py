"""Errors that reach a user. Each says what was wrong, what the limit is and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.protocol.echo import MAX_MESSAGE_CHARS, cut

MAX_PARAM_CHARS = 200


class TokenSpeedError(Exception):
    """Base of every error raised on purpose. Anything else that escapes is a bug of ours."""


class ConfigError(TokenSpeedError):
    """A flag, an environment value or a model's config that cannot be used. Ends the process with exit code 2."""


class CheckpointError(TokenSpeedError):
    """A model that cannot be found, read or matched. Names the file, the tensor and what was expected."""


class Field(str):
    """A request's field inside a message: its name in chat completions. Another API may call it otherwise."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ContextNumbers:
    """Tokens of a request that does not fit, though its prompt would."""

    context_len: int
    num_prompt: int
    max_tokens: int


class InvalidRequest(TokenSpeedError):
    """A request refused before it enters the engine (HTTP 400).

    Args:
        message: for the user; names the value, the limit and the remedy. Long ones lose their middle. In pieces
            where some are a `Field`.
        param: the request field at fault, in the API's spelling (`"top_p"`, `"messages"`), or None.
        code: a short machine-readable code (`"context_length_exceeded"`), or None.
        numbers: for APIs that tell them in words of their own.
    """

    def __init__(
        self,
        message: str | Sequence[str],
        param: str | None = None,
        code: str | None = None,
        numbers: ContextNumbers | None = None,
    ) -> None:
        # Whatever of the request a message shows: an answer of 10 MB helps nobody.
        self._pieces = (cut(message, MAX_MESSAGE_CHARS),) if isinstance(message, str) else tuple(message)
        self.message = cut("".join(self._pieces), MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.param = None if param is None else cut(param, MAX_PARAM_CHARS)
        self.code = code
        self.numbers = numbers

    def spoken_as(self, names: Mapping[str, str], param: str | None) -> InvalidRequest:
        """The same refusal, with other names of fields.

        Args:
            names: chat's name of a field -> another API's.
            param: the field at fault, as that API calls it.
        """
        pieces = [names.get(piece, piece) if isinstance(piece, Field) else piece for piece in self._pieces]
        return InvalidRequest(pieces, param, self.code, self.numbers)


class Overloaded(TokenSpeedError):
    """The bounded queue is full, or the engine is draining. HTTP 429 or 503 with Retry-After.

    Args:
        retry_after_s: seconds after which a client may try again.
        draining: True when the server is going away (503), False when it is only busy (429).
    """

    def __init__(self, message: str, retry_after_s: int, draining: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.draining = draining


class EngineDead(TokenSpeedError):
    """The engine process is gone. Running streams get an error event; the server exits non-zero."""
