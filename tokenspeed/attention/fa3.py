"""FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608) by the package `flash_attn_3`. Not verified by running it.

Written against the public interface `hopper/flash_attn_interface.py` of Dao-AILab/flash-attention, 3.0.0 beta 1:
`flash_attn_with_kvcache` with a page table, variable query lengths (`cu_seqlens_q`) and context lengths on the device
(`cache_seqlens`). Pages of any size; causal masks are aligned to the end of the context, as ours are. That interface
has no sinks: they are applied afterwards, by the log-sum-exp that it returns on request.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from tokenspeed.attention.adapters import (
    NOT_VERIFIED,
    capability_obstacle,
    common_obstacle,
    longest_query,
    package_obstacle,
)
from tokenspeed.attention.interface import AttentionBatch, AttentionNeed, LayerKV
from tokenspeed.kernels.ops import Ops

MODULE = "flash_attn_interface"


class FlashAttention3Backend:
    """Satisfies `AttentionBackend`."""

    name: ClassVar[str] = "fa3"
    can_record: ClassVar[bool] = True
    note: ClassVar[str | None] = NOT_VERIFIED

    def __init__(self, ops: Ops) -> None:
        self._attend: Any = importlib.import_module(MODULE).flash_attn_with_kvcache

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        return (
            common_obstacle(need, range(8, 257, 8), takes_sinks=True)
            or capability_obstacle(need, (9,))
            or package_obstacle(MODULE, "flash_attn_3 (built from hopper/ of flash-attention)")
        )

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing to prepare: the kernel reads lengths and pages from the device."""

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
        assert logit_cap is None, "selection gives no model with a logit cap to this backend"
        found = self._attend(
            q,
            kv.keys,
            kv.values,
            cache_seqlens=batch.seq_lens,
            page_table=batch.page_table,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=longest_query(batch),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            return_softmax_lse=sinks is not None,
        )
        # The pair is followed by more in some releases.
        out: torch.Tensor = found if sinks is None else found[0].mul_(_share(found[1], sinks))
        return out.flatten(1)


def _share(log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What a sink leaves to the keys, [T, Hq, 1], given the log-sum-exp of their logits, [Hq, T]."""
    return torch.sigmoid(log_sum - sinks[:, None]).t().unsqueeze(-1)
