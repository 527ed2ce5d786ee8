"""FlashAttention 4 through the package `flash-attn-4` (module `flash_attn.cute`). Not verified by running it.

Written against the public `flash_attn_varlen_func` of Dao-AILab/flash-attention's `flash_attn/cute/interface.py`
(flash-attn-4 4.0.0 beta): a page table instead of `cu_seqlens_k`, context lengths in `seqused_k`. Its kernels are
compiled for each shape when first used. On Hopper the pages must be as long as the kernel's key tile, 128 tokens.
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

MODULE = "flash_attn.cute"
PAGE_TOKENS = 128


class FlashAttention4Backend:
    """Satisfies `AttentionBackend`."""

    name: ClassVar[str] = "fa4"
    can_record: ClassVar[bool] = True
    note: ClassVar[str | None] = NOT_VERIFIED

    def __init__(self, ops: Ops) -> None:
        self._attend: Any = importlib.import_module(MODULE).flash_attn_varlen_func

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        reason = common_obstacle(need, range(64, 129, 32)) or capability_obstacle(need, (9, 10, 11))
        if reason is None and need.page_size != PAGE_TOKENS:
            reason = (
                f"it takes pages of {PAGE_TOKENS} tokens, --prefix-granularity is {need.page_size} "
                f"(set it to {PAGE_TOKENS})"
            )
        return reason or package_obstacle(MODULE, "flash-attn-4")

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
        assert sinks is None, "selection gives no model with sinks to this backend"
        # Some releases return (out, log-sum-exp), others the output alone.
        found = self._attend(
            q,
            kv.keys,
            kv.values,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=longest_query(batch),
            max_seqlen_k=batch.page_table.shape[1] * kv.keys.shape[1],
            seqused_k=batch.seq_lens,
            page_table=batch.page_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.flatten(1)
