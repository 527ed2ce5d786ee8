"""Our own Triton kernels over the paged pool, as the registry's `paged_attention` op chooses them on a GPU.

Decode rows are split over their context, prefill rows use the tensor cores, long whole prompts take torch's own
attention (cuDNN or FlashAttention); which of these runs is the op's decision.
"""

from __future__ import annotations

from typing import ClassVar

from tokenspeed.attention.interface import NEEDS_GPU, AttentionNeed
from tokenspeed.attention.paged import OpAttention


class TritonAttentionBackend(OpAttention):
    """Satisfies `AttentionBackend`."""

    name: ClassVar[str] = "triton"

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        return NEEDS_GPU if need.device != "cuda" else OpAttention.why_not_shape(need)
