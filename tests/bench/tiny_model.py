"""A model of a few thousand random weights, as a bare config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def write_config(folder: Path, **changes: Any) -> Path:
    """The file."""
    file = folder / "tiny.json"
    file.write_text(json.dumps(CONFIG | changes))
    return file
