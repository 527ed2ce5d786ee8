"""The truth for everything but attention: plain torch, fp32 inside, no care for speed. Never refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed.kernels.registry import Implementation, Need

REFERENCE_RANK = 1000


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `ops.Embedding`."""
    return table[token_ids]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.Linear`."""
    y = x.float() @ weight.float().t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.RMSNorm`. Normalises the last axis, so per-head norms [T, heads, D] pass through it too."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    return y.to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.AddRMSNorm`. The sum is rounded to the residual's dtype before it is normed."""
    residual.copy_(x.float() + residual.float())
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """NeoX rotary on float32 x [T, heads, D] with cos, sin [T, D/2]; a new tensor."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as a pool of `dtype` holds it: e4m3 ends at 448, and what is beyond must not become NaN."""
    return (x.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else x).to(dtype)


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
) -> torch.Tensor:
    """See `ops.QKVRopeCache`."""
    num_kv_heads, head_dim = keys.shape[2], keys.shape[3]
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    keys.view(-1, num_kv_heads, head_dim)[slots] = stored(rotate(k, cos, sin) / k_scale, keys.dtype)
    values.view(-1, num_kv_heads, head_dim)[slots] = stored(v / v_scale, values.dtype)
    return rotate(q, cos, sin).to(qkv.dtype)


def never(need: Need) -> str | None:
    """The reference serves every need."""
    return None


def reference(op: str, function: Callable[..., Any], can_record: bool = True) -> Implementation:
    """An `Implementation` entry for a stateless reference function."""
    return Implementation(op, "reference", REFERENCE_RANK, never, lambda need: function, can_record)


IMPLEMENTATIONS = (
    reference("embedding", embedding),
    reference("linear", linear),
    reference("rms_norm", rms_norm),
    reference("add_rms_norm", add_rms_norm),
    reference("silu_and_mul", silu_and_mul),
    reference("qkv_rope_cache", qkv_rope_cache),
)
