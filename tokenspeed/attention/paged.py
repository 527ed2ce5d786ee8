"""Attention over the paged pool through the registry's `paged_attention` op; where that op runs, this backend runs."""

from __future__ import annotations

import torch

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed, LayerKV
from tokenspeed.kernels.ops import Ops


class PagedAttentionBackend:
    """Satisfies `AttentionBackend`. Holds nothing but the op, so one instance may serve many models of one device."""

    name = "paged"

    def __init__(self, ops: Ops) -> None:
        self._attend = ops.paged_attention

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        if need.has_sinks:
            return "the paged_attention op has no attention sinks"
        if need.logit_cap is not None:
            return f"the paged_attention op has no logit cap (asked: {need.logit_cap})"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads do not share {need.num_kv_heads} key/value heads evenly"
        return None

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing to prepare: the op reads lengths and pages from the batch itself."""

    def run(
        self, q: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        if kv.v_scale == 1.0:  # CPU kernels that know no 8-bit pool need not know its scale
            return self._attend(q, kv.keys, kv.values, batch, scale * kv.k_scale, window)
        return self._attend(q, kv.keys, kv.values, batch, scale * kv.k_scale, window, kv.v_scale)
