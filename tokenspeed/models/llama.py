"""Llama (arXiv 2302.13971, 2407.21783) and the checkpoints that use its class: SmolLM2, TinyLlama and others.

RMSNorm, rotary (llama3, linear, dynamic and YaRN scalings), grouped-query attention, SwiGLU; biases where the config
says so (`attention_bias` covers q, k, v and o; `mlp_bias`).
"""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """The dense decoder as it is."""


ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}

EXAMPLE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position=256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        kind="llama3", theta=10000.0, factor=8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0
    ),
)
"""A tiny config for contract tests."""
