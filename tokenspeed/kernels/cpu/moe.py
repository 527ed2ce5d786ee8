"""Experts on a CPU by torch's matmuls: those that are hit, one after the other, their rows together.

Decode reads the weights of k experts a token, in bfloat16 2 bytes each, against 24 to 29 GB/s on the 2-core machine of
docs/log.md. MXFP4 and block fp8 experts are widened for each call: one of gpt-oss-20b takes one core about 20 ms, so a
token of that model some 2 s.
"""

from __future__ import annotations

from tokenspeed.kernels.cpu.torch_cpu import RANK, not_a_cpu
from tokenspeed.kernels.reference.moe import LoopedExperts
from tokenspeed.kernels.registry import Implementation
from tokenspeed.moe.interface import ExpertWeights, MoeNeed


class CpuExperts:
    """Satisfies `ops.ExpertKernels`."""

    def why_not(self, need: MoeNeed) -> str | None:
        """None: every format and shape can be served."""
        return None

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> LoopedExperts:
        """See `ops.ExpertKernels.pack`. Keeps the weights as they are; products are in the model's dtype."""
        return LoopedExperts(weights, need.activation, need.dtype)


IMPLEMENTATIONS = (Implementation("experts", "torch_cpu", RANK, not_a_cpu, lambda need: CpuExperts()),)
