"""A model config of which only the vocabulary size matters to this room."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, RopeConfig


def model_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=vocab_size,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
    )
