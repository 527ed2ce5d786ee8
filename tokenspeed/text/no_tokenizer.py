"""What stands in for the tokenizer of an engine that was started without one: ids pass through, text is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from tokenspeed.protocol.errors import InvalidRequest

NO_TOKENIZER = (
    "this engine runs without a tokenizer (--skip-tokenizer-init); send token ids to /v1/completions and ask for "
    "return_token_ids"
)


class NoTokenizer:
    """Satisfies `engine.interface.TokenizerFace` and `text.detokenizer.Decodes`: every token's text is empty.

    Args:
        vocab_size: rows of the model's embedding.
    """

    special_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def strips_leading_space(self) -> bool:
        """See `Decodes`."""
        return False

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> NoReturn:
        """
        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest(f"the prompt is text, but {NO_TOKENIZER}", param="prompt")

    def least_tokens(self, text: str) -> int:
        """Nothing is known."""
        return 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> NoReturn:
        """
        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest(f"token ids were to be turned into text, but {NO_TOKENIZER}")

    def token_to_id(self, spelling: str) -> None:
        """Nothing has a spelling."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Nothing."""
        return b""
