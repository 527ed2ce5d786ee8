"""Qwen3 dense (arXiv 2505.09388): the dense decoder with RMSNorm on every query and key head, before rotary."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """See the module."""

    @staticmethod
    def contradiction(config: ModelConfig) -> str | None:
        """See `Decoder.contradiction`."""
        fits = config.qk_norm
        return None if fits else "a Qwen3 config must have norms on q and k"


ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}

EXAMPLE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=128,
    max_position=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    tie_word_embeddings=True,
    qk_norm=True,
)
"""A tiny config for contract tests."""
