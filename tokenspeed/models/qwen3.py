"""Qwen3 dense (arXiv 2505.09388): the dense decoder with RMSNorm on every query and key head, before rotary."""

from __future__ import annotations

from tokenspeed.attention.interface import AttentionBackend
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.models.decoder import Decoder
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme


class Qwen3ForCausalLM(Decoder):
    """Raises:
    CheckpointError: the config has no q and k norms, which every Qwen3 has.
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
        if not config.qk_norm:
            raise CheckpointError("a Qwen3 config must have norms on q and k")
        super().__init__(config, mesh, scheme, ops, backend, moe)


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
