"""FlashInfer (Ye et al. 2025, arXiv 2501.01005) through the package `flashinfer-python`. Not verified by running it.

Written against the documentation of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, version 0.6: one wrapper serves
prefill, decode and mixed steps. Its `plan` splits the work on the host, so a step cannot be recorded into a graph; the
factor on the logits is given to `run` as `k_scale`, because layers may differ in it.

Pages of a step, request after request:   paged_kv_indices[paged_kv_indptr[r] : paged_kv_indptr[r + 1]]
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from tokenspeed.attention.adapters import NOT_VERIFIED, common_obstacle, package_obstacle
from tokenspeed.attention.interface import AttentionBatch, AttentionNeed, LayerKV
from tokenspeed.kernels.ops import Ops

MODULE = "flashinfer"
WORKSPACE_BYTES = 128 * 2**20
"""What its documentation recommends."""


class FlashInferBackend:
    """Satisfies `AttentionBackend`. Layers with different windows are planned apart, each once a step."""

    name: ClassVar[str] = "flashinfer"
    can_record: ClassVar[bool] = False
    note: ClassVar[str | None] = f"{NOT_VERIFIED}; it plans each step on the host, so none is recorded"

    def __init__(self, ops: Ops) -> None:
        self._library: Any = importlib.import_module(MODULE)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=ops.device)
        self._wrappers: dict[int | None, Any] = {}
        self._planned: set[int | None] = set()

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """See `AttentionBackend.why_not`."""
        reason = common_obstacle(need, range(64, 257, 64))
        if reason is None and (need.capability is None or need.capability < (8, 0)):
            reason = "it needs compute capability 8.0 or later"
        return reason or package_obstacle(MODULE, "flashinfer-python")

    def plan(self, batch: AttentionBatch) -> None:
        """Forget the last step's split; the first layer of each window makes its own, knowing the shape of heads."""
        assert batch.query_lens_host is not None, "a recorded step has no lengths on the host"
        self._planned.clear()

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
        if window not in self._wrappers:
            self._wrappers[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper = self._wrappers[window]
        if window not in self._planned:
            self._split(wrapper, q, kv, batch, window)
            self._planned.add(window)
        out: torch.Tensor = wrapper.run(q, (kv.keys, kv.values), k_scale=scale)
        return out.flatten(1)

    def _split(self, wrapper: Any, q: torch.Tensor, kv: LayerKV, batch: AttentionBatch, window: int | None) -> None:
        query_lens, seq_lens = batch.query_lens_host, batch.seq_lens_host
        assert query_lens is not None and seq_lens is not None
        page_size = kv.keys.shape[1]
        counts = [-(-length // page_size) for length in seq_lens]
        rows = [request for request, count in enumerate(counts) for _ in range(count)]
        columns = [column for count in counts for column in range(count)]
        where = torch.tensor([rows, columns], pin_memory=q.is_cuda).to(q.device, non_blocking=True)
        wrapper.plan(
            _starts(query_lens),
            _starts(counts),
            batch.page_table[where[0], where[1]],
            torch.tensor([(length - 1) % page_size + 1 for length in seq_lens], dtype=torch.int32),
            q.shape[1],
            kv.keys.shape[2],
            q.shape[2],
            page_size,
            causal=True,
            sm_scale=1.0,
            window_left=-1 if window is None else window - 1,
            q_data_type=q.dtype,
            kv_data_type=kv.keys.dtype,
        )


def _starts(lengths: list[int]) -> torch.Tensor:
    """[N + 1] int32 on the host: where each part begins, and the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32)
