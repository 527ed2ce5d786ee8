"""GPT-OSS 20B and 120B (model card, arXiv 2508.10925): experts in every layer, attention with sinks and windows.

Every second layer sees a sliding window; every head has a learned sink. Biases on q, k, v, o, the router and the
experts; the experts' activation is clamped. YaRN without truncation of its ramp.
"""

from __future__ import annotations

from tokenspeed.attention.interface import AttentionBackend
from tokenspeed.config.model import ModelConfig, MoeConfig, RopeConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.models.decoder import Decoder
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme


class GptOssForCausalLM(Decoder):
    """Raises:
    CheckpointError: the config has no experts or no sinks, which every GPT-OSS has.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        scheme: Scheme,
        ops: Ops,
        backend: AttentionBackend,
        moe: SelectedMoe | None = None,
    ) -> None:
        if config.moe is None or not config.attention_sinks:
            raise CheckpointError("a GPT-OSS config must have experts and attention sinks")
        super().__init__(config, mesh, scheme, ops, backend, moe)


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
