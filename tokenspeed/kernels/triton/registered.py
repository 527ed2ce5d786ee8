"""The Triton implementations as the registry knows them: for NVIDIA GPUs of compute capability 8.0 and later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cuda_graph import CudaGraphRecorder
from tokenspeed.kernels.registry import SLOT_OPS, Implementation, Need, nothing_to_say
from tokenspeed.kernels.triton.decode_attention import (
    choose_decode_tile,
    decode_attention,
    fitting_decode_tile,
    shared_workspace,
)
from tokenspeed.kernels.triton.gpu import has_pdl, shared_bytes, why_no_e4m3, why_no_triton
from tokenspeed.kernels.triton.launch import launch_notes
from tokenspeed.kernels.triton.pointwise import qkv_rope_cache, rms_norm, silu_and_mul
from tokenspeed.kernels.triton.prefill_attention import prefill_attention
from tokenspeed.kernels.triton.sampling import redraw_rows, sample_rows
from tokenspeed.kernels.triton.small_linear import MAX_ROWS, fused_linear, is_for_cublas, make_workspace
from tokenspeed.kernels.triton.step_inputs import decode_inputs, prefill_inputs
from tokenspeed.kernels.triton.whole_prompts import are_whole_prompts, attend_whole_prompts

TILES_GPU = "NVIDIA H200"
"""As torch names it: where `decode_attention.TILES`, `small_linear.choose_tile` and `is_for_cublas` were measured."""


def _has_pdl(need: Need) -> bool:
    return has_pdl(need.device)


def _embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return functional.embedding(token_ids, table)


class _Norms:
    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, pdl=self._pdl)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, residual, pdl=self._pdl)


class TritonLinear:
    """`FusedLinear`: few rows by the fused kernels, many by cuBLAS."""

    max_rows = MAX_ROWS

    def __init__(self, device: torch.device, pdl: bool) -> None:
        self._workspace = make_workspace(device)
        self._pdl = pdl
        self._limit = shared_bytes(device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        if norm is not None and x.shape[0] > 1:
            # Tensor cores take x from shared memory; a norm on the way there stalls the pipeline (3 times slower).
            x, norm = rms_norm(x, norm, eps, pdl=self._pdl), None
        return fused_linear(
            x, weight, self._workspace, bias, norm, eps, residual, gated, pdl=self._pdl, limit=self._limit
        )

    def why_not(self, in_features: int) -> str | None:
        """None when a weight of this width can be read in whole tiles."""
        return None if in_features % 64 == 0 else f"rows of {in_features} are not a multiple of 64"


class _Workspaces:
    """Scratch of `decode_attention`, one for each shape of heads: graphs hold its address. Made at the first call,
    whatever its size, so that a trial step meets all there will be; the first call is never a recorded one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def get(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (num_heads, num_kv_heads, head_dim)
        if shape not in self._made:
            self._made[shape] = shared_workspace(*shape, self._device)
        return self._made[shape]


class PagedAttention:
    """`kernels.ops.PagedAttention`: decode rows split over their context, prefill rows by tensor cores. Rows that a
    recorded step has beyond its requests become zeros: what follows may mix rows, as experts do."""

    def __init__(self, device: torch.device, pdl: bool) -> None:
        self._pdl = pdl
        self._workspaces = _Workspaces(device)
        self._limit = shared_bytes(device)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        out_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        if batch.num_tokens == batch.num_requests:
            return self._decode(q, keys, values, batch, scale, window, out_scale, sinks, logit_cap)
        max_query_len = batch.num_tokens if batch.query_lens_host is None else max(batch.query_lens_host)
        if window is None and logit_cap is None and are_whole_prompts(batch, q.dtype):
            out = attend_whole_prompts(q, keys, values, batch, scale, sinks)
            if out is not None:
                return out if out_scale == 1.0 else out.mul_(out_scale)
        return prefill_attention(
            q, keys, values, batch.page_table, batch.query_start, batch.seq_lens, max_query_len, scale, window,
            sinks, logit_cap, out_scale=out_scale, is_padded=batch.query_lens_host is None, limit=self._limit,
        )  # fmt: skip

    def _decode(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        out_scale: float,
        sinks: torch.Tensor | None,
        logit_cap: float | None,
    ) -> torch.Tensor:
        num_requests, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[2]
        tile = choose_decode_tile(num_requests * num_kv_heads, head_dim, window)
        tile = fitting_decode_tile(tile, q, keys, self._limit)
        workspace = self._workspaces.get(num_heads, num_kv_heads, head_dim)
        return decode_attention(
            q,
            keys,
            values,
            batch.page_table,
            batch.seq_lens,
            scale,
            workspace,
            tile,
            window,
            sinks,
            logit_cap,
            pdl=self._pdl,
            out_scale=out_scale,
        )


class _Linear:
    """`kernels.ops.Linear`: cuBLAS, and for few rows of 16 bits our own kernels, where they are quicker."""

    def __init__(self, fused: TritonLinear | None) -> None:
        self._fused = fused

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        fused = self._fused
        num_rows, width = x.shape
        if fused is None or not 0 < num_rows <= MAX_ROWS or fused.why_not(width) is not None or not x.is_contiguous():
            return functional.linear(x, weight, bias)
        if is_for_cublas(num_rows, weight.shape[0], width):
            return functional.linear(x, weight, bias)
        return fused(x, weight, bias)


def _make_linear(need: Need) -> _Linear:
    return _Linear(TritonLinear(need.device, _has_pdl(need)) if _why_not_half(need) is None else None)


def _notes(need: Need) -> list[str]:
    """Where the host or the GPU may be slower than it was measured to be: once, whatever ops are chosen."""
    name = torch.cuda.get_device_name(need.device)
    tiles = f"tiles of attention and linears: measured on {TILES_GPU}, this is {name}"
    return launch_notes() if name == TILES_GPU else [*launch_notes(), tiles]


def _entry(
    op: str, make: Callable[[Need], Any], why_not: Callable[[Need], str | None] = why_no_triton
) -> Implementation:
    notes = nothing_to_say if op in SLOT_OPS else _notes  # the model's ops have said it
    return Implementation(op=op, name="triton", rank=50, why_not=why_not, make=make, notes=notes)


def _why_not_half(need: Need) -> str | None:
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take 16-bit weights, the dtype is {need.dtype}"
    return why_no_triton(need)


def _why_not_pool(need: Need) -> str | None:
    """Of kernels that read or write the KV pool."""
    if (reason := why_no_triton(need)) is not None:
        return reason
    return why_no_e4m3(need.device) if need.kv_dtype == torch.float8_e4m3fn else None


IMPLEMENTATIONS = (
    _entry("embedding", lambda need: _embedding),
    _entry("rms_norm", lambda need: _Norms(_has_pdl(need)).rms_norm),
    _entry("add_rms_norm", lambda need: _Norms(_has_pdl(need)).add_rms_norm),
    _entry("qkv_rope_cache", lambda need: partial(qkv_rope_cache, pdl=_has_pdl(need)), _why_not_pool),
    _entry("paged_attention", lambda need: PagedAttention(need.device, _has_pdl(need)), _why_not_pool),
    _entry("silu_and_mul", lambda need: partial(silu_and_mul, pdl=_has_pdl(need))),
    _entry("linear", _make_linear),
    _entry("fused_linear", lambda need: TritonLinear(need.device, _has_pdl(need)), _why_not_half),
    _entry("recorder", lambda need: CudaGraphRecorder(need.device)),
    _entry("decode_inputs", lambda need: decode_inputs),
    _entry("prefill_inputs", lambda need: prefill_inputs),
    _entry("sample_rows", lambda need: partial(sample_rows, pdl=_has_pdl(need))),
    _entry("redraw_rows", lambda need: partial(redraw_rows, pdl=_has_pdl(need))),
)
