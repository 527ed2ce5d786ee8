"""Qwen2 and Qwen2.5 dense (arXiv 2407.10671): the dense decoder with biases on queries, keys and values only."""

from __future__ import annotations

from tokenspeed.attention.interface import AttentionBackend
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.models.decoder import Decoder
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme


class Qwen2ForCausalLM(Decoder):
    """Raises:
    CheckpointError: the config has no q, k, v biases, which every Qwen2 has.
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
        if not config.attention_bias or config.o_bias:
            raise CheckpointError("a Qwen2 config must have biases on q, k and v, and none on o")
        super().__init__(config, mesh, scheme, ops, backend, moe)


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
