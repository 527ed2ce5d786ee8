"""Attention over the paged pool through the registry's `paged_attention` op; and the backend of a CPU made of it."""

from __future__ import annotations

from typing import ClassVar

import torch

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed, LayerKV
from tokenspeed.kernels.ops import Ops


class OpAttention:
    """What every backend that runs the op shares. Holds nothing but the op, so one instance may serve many models."""

    can_record: ClassVar[bool] = True
    note: ClassVar[str | None] = None

    def __init__(self, ops: Ops) -> None:
        self._attend = ops.paged_attention

    @staticmethod
    def why_not_shape(need: AttentionNeed) -> str | None:
        """What the op cannot do on any device."""
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads do not share {need.num_kv_heads} key/value heads evenly"
        return None

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing to prepare: the op reads lengths and pages from the batch itself."""

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        return self._attend(q, kv.keys, kv.values, batch, scale * kv.k_scale, window, kv.v_scale, sinks, logit_cap)


class PagedAttentionBackend(OpAttention):
    """Satisfies `AttentionBackend`: the CPU's."""

    name: ClassVar[str] = "paged"

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        return "it is for CPUs; on a GPU use triton" if need.device != "cpu" else OpAttention.why_not_shape(need)
