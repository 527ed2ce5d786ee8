"""The gated MLP: down(silu(gate x) * up x) (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, join
from tokenspeed.layers.linear import MergedColumnParallel, Part, RowParallel
from tokenspeed.quantization.interface import Scheme


class GatedMLP:
    """x [T, H] -> [T, H].

    Args:
        prefix: HF name of the module (`model.layers.3.mlp`).
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, scheme: Scheme, ops: Ops, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = (Part(f"{prefix}.gate_proj", inner), Part(f"{prefix}.up_proj", inner))
        self._gate_up = MergedColumnParallel(hidden, parts, config.mlp_bias, mesh, scheme, f"{prefix}.gate_up_proj")
        self._down = RowParallel(inner, hidden, config.mlp_bias, mesh, scheme, f"{prefix}.down_proj")
        self._ops = ops

    def entries(self) -> Entries:
        return join((self._gate_up.entries(), self._down.entries()))

    def finish(self) -> None:
        self._gate_up.finish()
        self._down.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._ops.silu_and_mul(self._gate_up(x)))
