"""Adapters against stand-ins for their packages: the documented signatures, computed by the reference.

What the real packages do with these arguments is not shown here; that the adapters pass the right ones is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.attention.fa3 import FlashAttention3Backend
from tokenspeed.attention.fa4 import FlashAttention4Backend
from tokenspeed.attention.flashinfer import FlashInferBackend
from tokenspeed.attention.interface import AttentionBackend, AttentionBatch, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.kernels.reference.attention import paged_attention
from tokenspeed.kernels.registry import Need, select_ops

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32), only="reference")
PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
QUERY_LENS, SEQ_LENS = [1, 5, 3], [6, 5, 11]


@dataclass
class Pages:
    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@pytest.fixture
def kv() -> Pages:
    torch.manual_seed(0)
    return Pages(torch.randn(9, PAGE, KV_HEADS, DIM), torch.randn(9, PAGE, KV_HEADS, DIM))


def batch(on_host: bool = True) -> AttentionBatch:
    starts = [0, *torch.tensor(QUERY_LENS).cumsum(0).tolist()]
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        page_table=torch.tensor([[7, 2, 0], [1, 8, 0], [3, 0, 6]], dtype=torch.int32),
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        num_requests=len(SEQ_LENS),
        num_tokens=starts[-1],
        query_lens_host=QUERY_LENS if on_host else None,
        seq_lens_host=SEQ_LENS if on_host else None,
    )


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    assert (starts.dtype, seq_lens.dtype, pages.dtype) == (torch.int32,) * 3
    about = AttentionBatch(starts, seq_lens, pages, starts, len(seq_lens), len(q))
    return paged_attention(q, keys, values, about, scale, window, 1.0, sinks).view(q.shape)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """FlashAttention 3's, as far as the adapter uses it."""
    assert causal and max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    window = None if window_size[0] < 0 else window_size[0] + 1
    given = q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window
    out = attend(*given)
    if not return_softmax_lse:
        return out
    # A sink of 0 leaves a share s = e^lse / (e^lse + 1) of every row.
    with_zero = attend(*given, torch.zeros(q.shape[1]))
    share = ((with_zero * out).sum(-1) / (out * out).sum(-1)).double()
    return out, torch.log(share / (1 - share)).float().t(), None


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
) -> tuple[torch.Tensor, None]:
    """FlashAttention 4's, likewise."""
    assert causal and max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    assert max_seqlen_k >= int(seqused_k.max()) and window_size[1] in (None, 0)
    window = None if window_size[0] is None else window_size[0] + 1
    return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window), None


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's, likewise."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        type(self).num_plans += 1
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk) == (HEADS, KV_HEADS, DIM)
        assert q_data_type == kv_data_type == torch.float32
        first = paged_kv_indptr.tolist()
        lens = [
            (end - start - 1) * page_size + last
            for (start, end), last in zip(pairwise(first), paged_kv_last_page_len.tolist(), strict=True)
        ]
        table = torch.zeros(len(lens), max(b - a for a, b in pairwise(first)), dtype=torch.int32)
        for request, (start, end) in enumerate(pairwise(first)):
            table[request, : end - start] = paged_kv_indices[start:end]
        self.planned = qo_indptr, torch.tensor(lens, dtype=torch.int32), table
        self.scale, self.window = sm_scale, None if window_left < 0 else window_left + 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, k_scale: float
    ) -> torch.Tensor:
        return attend(q, *paged_kv_cache, *self.planned, self.scale * k_scale, self.window)


@pytest.fixture(params=["fa3", "fa4", "flashinfer"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    stand_in(monkeypatch, "flash_attn", __path__=[])
    stand_in(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)
    stand_in(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    kinds = (FlashAttention3Backend, FlashAttention4Backend, FlashInferBackend)
    return next(kind for kind in kinds if kind.name == request.param)(OPS)


@pytest.mark.parametrize("window", [None, 3])
def test_a_mixed_step(backend: AttentionBackend, kv: Pages, window: int | None) -> None:
    q = torch.randn(sum(QUERY_LENS), HEADS, DIM)
    for on_host in (True, False) if backend.can_record else (True,):
        step = batch(on_host)
        backend.plan(step)
        out = backend.run(q, kv, step, 0.3, window)
        torch.testing.assert_close(out, paged_attention(q, kv.keys, kv.values, step, 0.3, window))


@pytest.mark.parametrize("window", [None, 3])
def test_fa3_applies_sinks(monkeypatch: pytest.MonkeyPatch, kv: Pages, window: int | None) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    backend = FlashAttention3Backend(OPS)
    q, sinks = torch.randn(sum(QUERY_LENS), HEADS, DIM), torch.randn(HEADS)
    for on_host in (True, False):
        out = backend.run(q, kv, batch(on_host), 0.3, window, sinks)
        truth = paged_attention(q, kv.keys, kv.values, batch(), 0.3, window, 1.0, sinks)
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)


def test_flashinfer_plans_once_a_step_and_window(monkeypatch: pytest.MonkeyPatch, kv: Pages) -> None:
    stand_in(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "num_plans", 0)
    backend = FlashInferBackend(OPS)
    q = torch.randn(sum(QUERY_LENS), HEADS, DIM)
    for _ in range(2):
        backend.plan(batch())
        for window, scale in ((None, 0.3), (3, 0.3), (None, 0.5)):
            out = backend.run(q, kv, batch(), scale, window)
            torch.testing.assert_close(out, paged_attention(q, kv.keys, kv.values, batch(), scale, window))
    assert BatchPrefillWithPagedKVCacheWrapper.num_plans == 4


def test_an_installed_package_can_be_asked_for_and_is_said_to_be_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    need = AttentionNeed("cuda", torch.bfloat16, 32, 8, 128, 64, capability=(9, 0))
    backend, (line,) = select_backend(need, "fa3", OPS)
    assert (
        backend.name == "fa3" and line.startswith("attention: fa3 (asked for); this adapter") and "not been run" in line
    )
    _, (line,) = select_backend(need, "auto", OPS)
    assert line.startswith("attention: triton") and "fa3: not measured to be faster than triton" in line
