"""Long prompts without earlier context, by torch's own attention (cuDNN or FlashAttention) over copies of their pages.

Two kernels of our own around it: one copies the pages of keys and values, one applies sinks in place.

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
import triton
import triton.language as tl
from torch.backends import cuda
from torch.nn import functional

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2

LONG_PREFILL = 512
"""Tokens from which on torch's attention beats the Triton kernel (docs/log.md)."""
DTYPES = (torch.bfloat16, torch.float16)
"""Of queries. In float32 torch has but its plain form for groups of heads, which keeps every logit, [Hq, L, L]."""


def are_whole_prompts(batch: AttentionBatch, dtype: torch.dtype) -> bool:
    """Every request is a whole long prompt from its first token, of queries that torch's quick attention takes."""
    lens = batch.query_lens_host
    return dtype in DTYPES and lens is not None and lens == batch.seq_lens_host and min(lens) >= LONG_PREFILL


@triton.jit(do_not_specialize=["first", "length", "page_table_stride"])
def _copy_kernel(
    k_ptr,
    v_ptr,
    page_table_ptr,
    k_out_ptr,
    v_out_ptr,
    first,
    length,
    page_table_stride,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens of a request: all heads of a token lie together, in a page and in the copy."""
    request = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < length
    page_row = page_table_ptr + (first + request) * page_table_stride
    pages = tl.load(page_row + tokens // PAGE_SIZE, mask=live, other=0)
    slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
    cols = tl.arange(0, BLOCK_W)[None, :]
    mask = live[:, None] & (cols < WIDTH)
    here = slots[:, None] * WIDTH + cols
    there = (request * length + tokens)[:, None] * WIDTH + cols
    k = tl.load(k_ptr + here, mask=mask)
    v = tl.load(v_ptr + here, mask=mask)
    tl.store(k_out_ptr + there, k.to(k_out_ptr.dtype.element_ty), mask=mask)
    tl.store(v_out_ptr + there, v.to(v_out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _sink_kernel(
    out_ptr,
    log_sum_ptr,
    sinks_ptr,
    length,
    batch_stride,
    head_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T rows of a head, in place: times what its sink leaves to the keys."""
    head, prompt = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)[None, :]
    live = tokens < length
    sink = tl.load(sinks_ptr + head)
    log_sum = tl.load(log_sum_ptr + (prompt * tl.num_programs(1) + head) * length + tokens, mask=live, other=0.0)
    rows = (
        out_ptr + prompt * batch_stride + head.to(tl.int64) * head_stride + tokens.to(tl.int64)[:, None] * token_stride
    )
    mask = live[:, None] & (dims < HEAD_DIM)
    x = tl.load(rows + dims, mask=mask).to(tl.float32) * tl.sigmoid(log_sum - sink)[:, None]
    tl.store(rows + dims, x.to(out_ptr.dtype.element_ty), mask=mask)


_copy, _sink = QuickLaunch(_copy_kernel), QuickLaunch(_sink_kernel)


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
    outs = []
    start = first = 0
    for length, group in groupby(lens):
        count = len(list(group))
        end = start + count * length
        k, v = copy_pages(keys, values, batch.page_table, first, count, length, q.dtype)
        mine = q if end - start == len(q) else q[start:end]
        out = _causal(
            mine.unflatten(0, (count, length)).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, sinks
        )
        if out is None:
            return None
        outs.append(out.transpose(1, 2).reshape(count * length, -1))
        start, first = end, first + count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def copy_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    first: int,
    count: int,
    length: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `length` tokens of requests [first, first + count), each [count, length, Hk, D].

    Args:
        keys, values: [pages, page_size, Hk, D]. page_table: [R, P] int32.
        dtype: of the copies.
    """
    _, page_size, num_kv_heads, head_dim = keys.shape
    width, block_t = num_kv_heads * head_dim, 8
    k = torch.empty(count, length, num_kv_heads, head_dim, dtype=dtype, device=keys.device)
    v = torch.empty_like(k)
    _copy[(ceil_div(length, block_t), count)](
        keys,
        values,
        page_table,
        k,
        v,
        first,
        length,
        page_table.stride(0),
        WIDTH=width,
        BLOCK_W=power_of_2(width),
        PAGE_SIZE=page_size,
        BLOCK_T=block_t,
        num_warps=8,
    )
    return k, v


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
    apply_sinks(out, log_sum, sinks)
    return out


def apply_sinks(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> None:
    """out[b, h, t] *= sigmoid(log_sum[b, h, t] - sinks[h]).

    Args:
        out: [B, Hq, L, D], each row of D together, with any strides else.
        log_sum: float32, [B, Hq, L] or [B, Hq, L, 1]. sinks: [Hq] float32.
    """
    count, num_heads, length, head_dim = out.shape
    block_t = 32
    _sink[(ceil_div(length, block_t), num_heads, count)](
        out,
        log_sum.contiguous(),
        sinks,
        length,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_2(head_dim),
        BLOCK_T=block_t,
        num_warps=2,
    )


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
