from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_models import model_config

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.gguf_tokenizer import build_gguf_tokenizer
from tokenspeed.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def smollm(default_checkpoint: Checkpoint) -> Tokenizer:
    """The embedded model's tokenizer, with eight rows of padding in the embedding."""
    return load_tokenizer(default_checkpoint, model_config(49152 + 8))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    metadata = json.loads(Path(__file__).with_name("sentencepiece_golden.json").read_text())["metadata"]
    backend, special = build_gguf_tokenizer(metadata, "tiny.gguf")
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    return Tokenizer(backend, vocab_size=num_tokens, special_tokens=special, chat_templates={}, origin="tiny.gguf")
