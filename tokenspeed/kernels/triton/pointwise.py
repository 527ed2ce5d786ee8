"""Norms, rotary with cache write, gated activation: memory-bound steps between the matmuls.

add_rms_norm    r += x; y = r / sqrt(mean(r^2) + eps) * w: reads x and r, writes r and y, 8 bytes an element in bf16
qkv_rope_cache  split, optional per-head RMSNorm of q and k, NeoX rotary, k and v to their pages: 4 bytes an element
silu_and_mul    silu(gate) * up: 6 bytes an output element
Bound           those bytes at 4.26 TB/s on an H200; for few rows launch latency, which programmatic dependent launch
                hides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        x = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * H + cols, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    tl.store(y_ptr + row * H + cols, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


_rms_norm = QuickLaunch(_rms_norm_kernel)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, pdl: bool = True
) -> torch.Tensor:
    """x [T, H] contiguous -> the norm, new [T, H]. With a residual [T, H]: residual += x in place, norm of the sum."""
    out = torch.empty_like(x)
    width = x.shape[1]
    block = power_of_2(width)
    _rms_norm[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        H=width,
        BLOCK=block,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_inverse,
    v_inverse,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TO_E4M3: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns one token and BLOCK_H heads of [queries | keys | values]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_HALF)
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (is_query | is_key | is_value)[:, None] & (half < HALF)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = qkv_ptr + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM + heads[:, None] * HEAD_DIM + half[None, :]
    x1 = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / HEAD_DIM + eps)[:, None]
        in_half = (half < HALF)[None, :]
        use_q = is_query[:, None]
        w1 = tl.where(
            use_q,
            tl.load(q_norm_ptr + half[None, :], mask=in_half, other=0.0),
            tl.load(k_norm_ptr + half[None, :], mask=in_half, other=0.0),
        ).to(tl.float32)
        w2 = tl.where(
            use_q,
            tl.load(q_norm_ptr + HALF + half[None, :], mask=in_half, other=0.0),
            tl.load(k_norm_ptr + HALF + half[None, :], mask=in_half, other=0.0),
        ).to(tl.float32)
        y1, y2 = x1 * scale * w1, x2 * scale * w2
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + half, mask=half < HALF, other=0.0)[None, :]
    r1 = y1 * cos - y2 * sin
    r2 = y2 * cos + y1 * sin
    kind = qkv_ptr.dtype.element_ty
    tl.store(row, r1.to(kind), mask=mask & is_query[:, None])
    tl.store(row + HALF, r2.to(kind), mask=mask & is_query[:, None])
    if TO_E4M3:
        # Rotated values and raw ones are stored from here on, each by its own scale; e4m3 ends at 448.
        r1, r2 = tl.clamp(r1 * k_inverse, -448.0, 448.0), tl.clamp(r2 * k_inverse, -448.0, 448.0)
        x1, x2 = tl.clamp(x1 * v_inverse, -448.0, 448.0), tl.clamp(x2 * v_inverse, -448.0, 448.0)
    slot = tl.load(slots_ptr + token)
    k_row = keys_ptr + slot * NUM_KV_HEADS * HEAD_DIM + (heads - NUM_HEADS)[:, None] * HEAD_DIM + half[None, :]
    tl.store(k_row, r1.to(keys_ptr.dtype.element_ty), mask=mask & is_key[:, None])
    tl.store(k_row + HALF, r2.to(keys_ptr.dtype.element_ty), mask=mask & is_key[:, None])
    value_heads = heads - NUM_HEADS - NUM_KV_HEADS
    v_row = values_ptr + slot * NUM_KV_HEADS * HEAD_DIM + value_heads[:, None] * HEAD_DIM + half[None, :]
    tl.store(v_row, x1.to(values_ptr.dtype.element_ty), mask=mask & is_value[:, None])
    tl.store(v_row + HALF, x2.to(values_ptr.dtype.element_ty), mask=mask & is_value[:, None])


_rope_cache = QuickLaunch(_rope_cache_kernel)


def qkv_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = True,
) -> torch.Tensor:
    """See `kernels.ops.QKVRopeCache`. Queries are rotated in place; returns a view of qkv."""
    num_tokens = qkv.shape[0]
    _, _, num_kv_heads, head_dim = keys.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    total = num_heads + 2 * num_kv_heads
    block_h = 4 if num_tokens < 64 else min(16, power_of_2(total))
    _rope_cache[(num_tokens, ceil_div(total, block_h))](
        qkv,
        positions,
        cos_sin,
        keys,
        values,
        slots,
        q_norm,
        k_norm,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        HAS_NORM=q_norm is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=head_dim // 2,
        BLOCK_HALF=power_of_2(head_dim // 2),
        BLOCK_H=block_h,
        TO_E4M3=keys.dtype == torch.float8_e4m3fn,
        PDL=pdl,
        num_warps=1 if block_h == 4 else 4,
        launch_pdl=pdl,
    )
    return qkv.view(num_tokens, total, head_dim)[:, :num_heads]


@triton.jit
def _silu_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + cols, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=inside)


_silu = QuickLaunch(_silu_kernel)


def silu_and_mul(gate_up: torch.Tensor, pdl: bool = True) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    block = 1024
    _silu[(num_tokens, ceil_div(width, block))](gate_up, out, width, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
