"""Qwen2 and Qwen2.5 dense (arXiv 2407.10671): the dense decoder with biases on queries, keys and values only."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """See the module."""

    @staticmethod
    def contradiction(config: ModelConfig) -> str | None:
        """See `Decoder.contradiction`."""
        fits = config.attention_bias and not config.o_bias
        return None if fits else "a Qwen2 config must have biases on q, k and v, and none on o"


ARCHITECTURES = {"Qwen2ForCausalLM": Qwen2ForCausalLM}

EXAMPLE = ModelConfig(
    architecture="Qwen2ForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    tie_word_embeddings=True,
    attention_bias=True,
)
"""A tiny config for contract tests."""
