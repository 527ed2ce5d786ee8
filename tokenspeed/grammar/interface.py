"""The face of a grammar library: what is compiled, where, and what follows a text token by token.

A grammar is compiled in a process that can be killed (`worker`), crosses to the engine as bytes, is loaded there once
and followed by one matcher a sequence. Nothing here knows of requests, steps or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.protocol.errors import TokenSpeedError
from tokenspeed.protocol.grammar import GrammarKind

MaskRow = NDArray[np.int32]
"""Bits of one row, [ceil(V / 32)]: bit i % 32 of word i // 32 is set when token i may come next."""


class GrammarError(TokenSpeedError):
    """A grammar that cannot be used; the text says why, for the user."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a library has to know of the tokenizer. Crosses to the worker as MessagePack.

    Fields:
        tokens: exact bytes of each id, [V]; empty for ids without text.
        special_ids: ids that are no text; only a structural tag may ask for their spelling.
        eos_token_ids: what ends an output.
    """

    tokens: list[bytes]
    special_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """Words of a mask row."""
        return -(-len(self.tokens) // 32)

    def text_tokens(self) -> list[bytes]:
        """`tokens` with special ones emptied, so that no grammar takes them for text."""
        special = set(self.special_ids) | set(self.eos_token_ids)
        return [b"" if token_id in special else token for token_id, token in enumerate(self.tokens)]

    def named_tokens(self) -> list[bytes]:
        """`tokens`, where special ones have bytes that are in no text: a grammar can only name them by id."""
        special = set(self.special_ids) | set(self.eos_token_ids)
        return [b"\xff%d" % token_id if token_id in special else token for token_id, token in enumerate(self.tokens)]


class GrammarOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How grammars are made.

    Fields:
        any_whitespace: JSON may be laid out freely; else the compact form `{"a": 1}` only.
    """

    any_whitespace: bool = True


class Matcher(Protocol):
    """Follows one output. One thread at a time."""

    @property
    def is_terminated(self) -> bool:
        """True once an end-of-sequence token has been accepted."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the library cannot follow any further (a limit of its own on size or time), for the user; else None."""
        ...

    def fill(self, row: MaskRow) -> bool:
        """Write the tokens that may come next; False: all may, `row` is not meaningful. A terminated matcher allows the
        end-of-sequence ids."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by one token. False: the grammar does not allow it, and nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""
        ...


class CompiledGrammar(Protocol):
    """A grammar for one vocabulary. Any thread; never changes."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes, roughly."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the start of an output."""
        ...


class Backend(Protocol):
    """A library with one vocabulary."""

    def compile(self, kind: GrammarKind, text: str) -> bytes:
        """The compiled form, to be loaded in another process. Runs in the worker: may take for ever or crash.

        Raises:
            GrammarError: the grammar is not valid, or more than the library can do.
        """
        ...

    def load(self, compiled: bytes) -> CompiledGrammar:
        """What `compile` made, ready for use. Takes well under a second.

        Raises:
            GrammarError: as above.
        """
        ...

    def fill_all(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> None:
        """`Matcher.fill` of matchers of this library that are not terminated, on several cores where it can. Where all
        tokens may come next, the row says so.

        Args:
            rows: [len(matchers), num_words].
        """
        ...
