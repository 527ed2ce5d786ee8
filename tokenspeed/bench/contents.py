"""Random content of a wanted length: token ids, or text made of them where a server is to be sent text.

Owns the tokenizer that text needs. Found as the server finds its own (a folder, a .gguf file, a hub id, `default`), but
read without the model's config, so that any server's tokenizer will do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import tokenizers

from tokenspeed.bench.sessions import Piece
from tokenspeed.checkpoint.gguf_file import read_gguf
from tokenspeed.checkpoint.resolve import resolve_tokenizer
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.text.chat_template import load_chat_template, render_chat_ids
from tokenspeed.text.gguf_tokenizer import build_gguf_tokenizer
from tokenspeed.text.tokenizer import load_tokenizer

FIRST_ID = 1000
"""Below it vocabularies keep bytes and special tokens."""


class Contents(Protocol):
    """Makes content."""

    def piece(self, length: int) -> Piece:
        """New content of `length` tokens (text: about that many)."""
        ...


class RandomIds:
    """Token ids, uniform over [1000, vocab_size), or over the upper half of a small vocabulary."""

    def __init__(self, vocab_size: int, generator: random.Random) -> None:
        self._ids = range(min(FIRST_ID, vocab_size // 2), vocab_size)
        self._generator = generator

    def piece(self, length: int) -> list[int]:
        """See `Contents`."""
        return self._generator.choices(self._ids, k=length)


class RandomText:
    """Text whose tokens were drawn at random, cut so that it encodes to the wanted length."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, generator: random.Random) -> None:
        self._tokenizer = tokenizer
        self._ids = RandomIds(tokenizer.get_vocab_size(with_added_tokens=False), generator)

    def piece(self, length: int) -> str:
        """See `Contents`."""
        text = self._tokenizer.decode(self._ids.piece(length))
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        cut: str = self._tokenizer.decode(ids[:length])
        return cut


def count_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    """Tokens of a text, without what a post-processor adds."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def chat_prompt(name: str) -> Callable[[str], list[int]]:
    """A function from a user's message to the token ids of the prompt that the model's chat template makes of it.

    Raises:
        CheckpointError: no tokenizer, or one that cannot be read.
    """
    tokenizer = load_tokenizer(resolve_tokenizer(name), None)
    template = load_chat_template(tokenizer)
    return lambda text: render_chat_ids(tokenizer, template, [{"role": "user", "content": text}])


def load_backend(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a model.

    Raises:
        CheckpointError: there is none, or one that cannot be read.
    """
    path = Path(resolve_tokenizer(name))
    if path.is_file():
        return build_gguf_tokenizer(read_gguf(path).metadata, str(path))[0]
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: no tokenizer.json; pass --tokenizer with a folder that has one")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer that can be read: {error}") from error
