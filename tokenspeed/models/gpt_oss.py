"""GPT-OSS 20B and 120B (model card, arXiv 2508.10925): experts in every layer, attention with sinks and windows.

Every second layer sees a sliding window; every head has a learned sink. Biases on q, k, v, o, the router and the
experts; the experts' activation is clamped. YaRN without truncation of its ramp.
"""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig, MoeConfig, RopeConfig
from tokenspeed.models.decoder import Decoder


class GptOssForCausalLM(Decoder):
    """See the module."""

    @staticmethod
    def contradiction(config: ModelConfig) -> str | None:
        """See `Decoder.contradiction`."""
        fits = config.moe is not None and config.attention_sinks
        return None if fits else "a GPT-OSS config must have experts and attention sinks"


ARCHITECTURES = {"GptOssForCausalLM": GptOssForCausalLM}

EXAMPLE = ModelConfig(
    architecture="GptOssForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position=256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(kind="yarn", theta=150000.0, factor=4.0, original_max_position=64, truncate=False),
    attention_bias=True,
    o_bias=True,
    layer_windows=(8, None),
    attention_sinks=True,
    moe=MoeConfig(
        num_experts=4,
        top_k=2,
        intermediate_size=96,
        scoring="topk_softmax",
        renormalize=False,
        router="router",
        router_bias=True,
        expert_bias=True,
        limit=7.0,
        alpha=1.702,
        layout="interleaved",
    ),
)
"""A tiny config for contract tests."""
