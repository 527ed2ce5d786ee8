"""The one place that runs a tokenizer's own Python code (`--trust-remote-code`), through optional `transformers`."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from tokenspeed.protocol.errors import CheckpointError


def load_remote_backend(path: Path) -> tokenizers.Tokenizer:
    """Let `transformers` build the tokenizer of a folder and take its `tokenizers` backend.

    Raises:
        CheckpointError: `transformers` is missing, the code failed, or the tokenizer is pure Python without a backend.
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
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(
            f"{path}: {type(remote).__name__} has no `tokenizers` backend; convert it to a tokenizer.json and "
            "pass its folder with --tokenizer"
        )
    return backend
