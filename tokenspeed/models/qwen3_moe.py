"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a sparse MLP in most layers.

The router's softmax goes over all experts; the weights of the chosen ones are divided by their sum where the config
says so (`norm_topk_prob`).
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


class Qwen3MoeForCausalLM(Decoder):
    """Raises:
    CheckpointError: the config has no experts, or no q and k norms, which every Qwen3 MoE has.
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
        if config.moe is None or not config.qk_norm:
            raise CheckpointError("a Qwen3 MoE config must have experts and norms on q and k")
        super().__init__(config, mesh, scheme, ops, backend, moe)


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
