"""Errors that reach a user. Each says what was wrong, what the limit is and what to do about it."""

from tokenspeed.protocol.echo import MAX_MESSAGE_CHARS, cut

MAX_PARAM_CHARS = 200


class TokenSpeedError(Exception):
    """Base of every error raised on purpose. Anything else that escapes is a bug of ours."""


class ConfigError(TokenSpeedError):
    """A flag, an environment value or a model's config that cannot be used. Ends the process with exit code 2."""


class CheckpointError(TokenSpeedError):
    """A model that cannot be found, read or matched. Names the file, the tensor and what was expected."""


class InvalidRequest(TokenSpeedError):
    """A request refused before it enters the engine (HTTP 400).

    Args:
        message: for the user; names the value, the limit and the remedy. Long ones lose their middle.
        param: the request field at fault, in the API's spelling (`"top_p"`, `"messages"`), or None.
        code: a short machine-readable code (`"context_length_exceeded"`), or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        # Whatever of the request a message shows: an answer of 10 MB helps nobody.
        message = cut(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else cut(param, MAX_PARAM_CHARS)
        self.code = code


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
