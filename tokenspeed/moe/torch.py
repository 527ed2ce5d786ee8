"""Experts on a CPU: the `experts` op, by torch's matmuls."""

from __future__ import annotations

from typing import ClassVar

from tokenspeed.kernels.ops import Ops
from tokenspeed.moe.interface import Experts, ExpertWeights, MoeNeed


class TorchMoeBackend:
    """Satisfies `MoeBackend`."""

    name: ClassVar[str] = "torch"
    note: ClassVar[str | None] = None

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    @staticmethod
    def why_not(need: MoeNeed) -> str | None:
        """See `MoeBackend.why_not`."""
        return None if need.device == "cpu" else "it computes on the CPU"

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> Experts:
        """See `MoeBackend.pack`."""
        assert self._ops.experts is not None, "selected without kernels"
        return self._ops.experts.pack(weights, need)
