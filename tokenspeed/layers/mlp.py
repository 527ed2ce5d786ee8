"""The gated MLP: down(silu(gate x) * up x) (SwiGLU, Shazeer 2020); `out`, the down projection, is applied by the
residual stream."""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, join
from tokenspeed.layers.linear import MergedColumnParallel, Part, RowParallel
from tokenspeed.layers.stream import Normed
from tokenspeed.quantization.interface import Scheme


class GatedMLP:
    """x [T, H] -> silu(gate x) * up x, [T, intermediate_size], which `out` projects back.

    Args:
        prefix: HF name of the module (`model.layers.3.mlp`).
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, scheme: Scheme, ops: Ops, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = (Part(f"{prefix}.gate_proj", inner), Part(f"{prefix}.up_proj", inner))
        self._gate_up = MergedColumnParallel(hidden, parts, config.mlp_bias, mesh, scheme, f"{prefix}.gate_up_proj")
        self.out = RowParallel(inner, hidden, config.mlp_bias, mesh, scheme, f"{prefix}.down_proj")
        self._ops = ops

    def entries(self) -> Entries:
        return join((self._gate_up.entries(), self.out.entries()))

    def finish(self) -> None:
        self._gate_up.finish()
        self.out.finish()

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which the projections may fuse with norm, activation and stream."""
        return min(self._gate_up.max_fused_rows, self.out.max_fused_rows)

    def __call__(self, x: torch.Tensor | Normed) -> torch.Tensor:
        """x, or its norm left to do."""
        if isinstance(x, Normed):
            return self._gate_up.fused(x.x, x.norm.weight, x.norm.eps, gated=True)
        return self._ops.silu_and_mul(self._gate_up(x))
