"""The one place that runs a tokenizer's own Python code (`--trust-remote-code`), through optional `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers

from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.text.tiktoken_backend import SAMPLES, tiktoken_backend


@runtime_checkable
class TiktokenEncoding(Protocol):
    """What a `tiktoken.Encoding` has. Its parts have no public names."""

    _mergeable_ranks: dict[bytes, int]
    _pat_str: str
    _special_tokens: dict[str, int]

    def encode(self, text: str, *, disallowed_special: tuple[str, ...]) -> list[int]: ...


def load_remote_backend(path: Path) -> tokenizers.Tokenizer:
    """Let `transformers` build the tokenizer of a folder and take its `tokenizers` backend, or make one of the tiktoken
    vocabulary that it has inside.

    Raises:
        CheckpointError: `transformers` is missing, the code failed, or the tokenizer is neither of the two.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{path}: this tokenizer needs the transformers package: pip install transformers"
        ) from error
    try:
        remote = AutoTokenizer.from_pretrained(str(path), trust_remote_code=True)
    except Exception as error:  # whatever the model's own code raises
        raise CheckpointError(f"{path}: the tokenizer's own code failed: {type(error).__name__}: {error}") from error
    backend = getattr(remote, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return backend
    encoding = next((value for value in vars(remote).values() if isinstance(value, TiktokenEncoding)), None)
    if encoding is None:
        raise CheckpointError(
            f"{path}: {type(remote).__name__} has neither a `tokenizers` backend nor a tiktoken vocabulary; convert it "
            "to a tokenizer.json and pass its folder with --tokenizer"
        )
    return _converted(encoding, str(path))


def _converted(encoding: TiktokenEncoding, origin: str) -> tokenizers.Tokenizer:
    backend = tiktoken_backend(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens, origin)
    backend.encode_special_tokens = True
    for text in SAMPLES:
        wanted, found = encoding.encode(text, disallowed_special=()), backend.encode(text, add_special_tokens=False).ids
        if wanted != found:
            raise CheckpointError(
                f"{origin}: its tiktoken vocabulary cannot be used: {text!r} became {found[:8]}... instead of "
                f"{wanted[:8]}...; convert it to a tokenizer.json and pass its folder with --tokenizer"
            )
    backend.encode_special_tokens = False
    return backend
