"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a sparse MLP in most layers.

The router's softmax goes over all experts; the weights of the chosen ones are divided by their sum where the config
says so (`norm_topk_prob`).
"""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, MoeConfig, RopeConfig
from tokenspeed.models.decoder import Decoder


class Qwen3MoeForCausalLM(Decoder):
    """See the module."""

    @staticmethod
    def contradiction(config: ModelConfig) -> str | None:
        """See `Decoder.contradiction`."""
        fits = config.moe is not None and config.qk_norm
        return None if fits else "a Qwen3 MoE config must have experts and norms on q and k"


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}

EXAMPLE = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=128,
    max_position=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    qk_norm=True,
    moe=MoeConfig(num_experts=8, top_k=3, intermediate_size=32, dense_layers=(1,)),
)
"""A tiny config for contract tests: experts, a dense layer, experts."""
