"""A model on disk: where its files are and in which format. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved model name. All paths exist.

    Fields:
        name: what the user typed, or `default`; becomes the served model name.
        format: how the weights lie; `config` = a config.json only (load_format dummy).
        config_path: config.json, or the .gguf file itself.
        weight_files: safetensors shards in order, or the one .gguf file.
        tokenizer_path: folder with tokenizer files, or the .gguf file.
    """

    name: str
    format: Literal["safetensors", "gguf", "config"]
    config_path: str
    weight_files: tuple[str, ...]
    tokenizer_path: str
