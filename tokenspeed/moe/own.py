"""Our own expert kernels, the op `experts`: by Triton on an NVIDIA GPU, by torch's matmuls on a CPU."""

from __future__ import annotations

from typing import ClassVar

from tokenspeed.kernels.ops import Ops
from tokenspeed.moe.interface import Experts, ExpertWeights, MoeNeed


class _OwnMoeBackend:
    """What both have in common: they serve what the op serves, on one kind of device."""

    device: ClassVar[str]
    elsewhere: ClassVar[str]
    """Why not on other devices."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    @classmethod
    def why_not(cls, need: MoeNeed) -> str | None:
        """See `MoeBackend.why_not`."""
        return None if need.device == cls.device else cls.elsewhere

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> Experts:
        """See `MoeBackend.pack`."""
        assert self._ops.experts is not None, "selected without kernels"
        return self._ops.experts.pack(weights, need)


class TritonMoeBackend(_OwnMoeBackend):
    """Satisfies `MoeBackend`."""

    name: ClassVar[str] = "triton"
    device = "cuda"
    elsewhere = "it needs an NVIDIA GPU"


class TorchMoeBackend(_OwnMoeBackend):
    """Satisfies `MoeBackend`."""

    name: ClassVar[str] = "torch"
    device = "cpu"
    elsewhere = "it computes on the CPU"
