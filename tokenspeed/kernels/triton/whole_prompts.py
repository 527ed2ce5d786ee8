"""Long prompts without earlier context, by torch's own attention (cuDNN or FlashAttention) over copies of their pages.

Formula   as `prefill_attention`, without windows. A sink is one exponent more in the softmax's denominator: the rows of
          plain attention, of which these kernels give the log-sum-exp, times sigmoid(log-sum-exp - sink).
Operations  2 * num_heads * head_dim * L * (L + 1) for a prompt of L tokens.
Bytes     queries and outputs once; keys and values three times: out of their pages, into the copies, out of these.
          (2 num_heads + 6 num_kv_heads) * head_dim * L numbers; 32 / 8 heads of 128, bfloat16: 28 KiB a token, at 512
          tokens 3.4 us at 4.26 TB/s beside 2.7 us of operations, at 8000 tokens 54 us beside 650.
Bound     808 TFLOP/s bf16 on an H200; cuDNN 612 at 8000 tokens, against 393 of our Triton kernel (docs/log.md).
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch.backends import cuda
from torch.nn import functional

from tokenspeed.attention.interface import AttentionBatch

LONG_PREFILL = 512
"""Tokens from which on torch's attention beats the Triton kernel (docs/log.md)."""


def are_whole_prompts(batch: AttentionBatch) -> bool:
    """Every request is a whole long prompt from its first token."""
    lens = batch.query_lens_host
    return lens is not None and lens == batch.seq_lens_host and min(lens) >= LONG_PREFILL


def attend_whole_prompts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Neighbours of equal length in one call. See `ops.PagedAttention`; None where sinks cannot be served this way."""
    lens = batch.query_lens_host or []
    page_size = keys.shape[1]
    outs = []
    start = first = 0
    for length, group in groupby(lens):
        count = len(list(group))
        pages = batch.page_table[first : first + count, : -(-length // page_size)]
        k = keys[pages].flatten(1, 2)[:, :length].transpose(1, 2).to(q.dtype)
        v = values[pages].flatten(1, 2)[:, :length].transpose(1, 2).to(q.dtype)
        end = start + count * length
        mine = q[start:end].unflatten(0, (count, length)).transpose(1, 2)
        out = _causal(mine, k, v, scale, sinks)
        if out is None:
            return None
        outs.append(out.transpose(1, 2).reshape(count * length, -1))
        start, first = end, first + count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """q [B, Hq, L, D], k and v [B, Hk, L, D] -> [B, Hq, L, D]."""
    if sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    found = _with_log_sum(q, k, v, scale)
    if found is None:
        return None
    out, log_sum = found
    share = torch.sigmoid(log_sum.reshape(out.shape[:3]) - sinks[:, None])
    return out.mul_(share.unsqueeze(-1))


def _with_log_sum(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Causal attention, and the natural logarithm of each row's sum of exponentials, float32 [B, Hq, L] or [..., 1].

    These are the operations that `scaled_dot_product_attention` chooses from, asked in its words whether they can.
    """
    aten, about = torch.ops.aten, cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    if cuda.can_use_cudnn_attention(about):
        out, log_sum, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)
        return out, log_sum
    if q.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(about):
        out, log_sum, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
        return out, log_sum
    return None
