"""Paged attention for requests with several query tokens in the step: prefill, chunked prefill, mixed batches.

Formula   o[i, h] = softmax(scale * q[i, h] . K[j]) V over context positions j <= position of i (and, windowed, the last
          `window` of them); optional sink logit a head, optional cap: logit = cap * tanh(logit / cap)
Operations  4 * num_heads * head_dim * (query, visible key) pairs. Bytes: queries, outputs, and the context's keys and
          values once a query block.
Bound     808 TFLOP/s bf16 on an H200; softmax's exponentials and the register traffic of a kernel without warp
          specialisation hold it to about half of that.

Positions of request r, half-open:   [0, seq_len - query_len) earlier context   [seq_len - query_len, seq_len) this step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenspeed.kernels.triton.gpu import NO_LIMIT, copies, fitting
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc,
    total,
    best,
    q,
    k_ptr,
    v_ptr,
    page_row,
    positions,
    start,
    seq_len,
    kv_head,
    scale,
    logit_cap: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One block of BLOCK_T keys. Logits are kept in base 2."""
    dims = tl.arange(0, BLOCK_D)
    tokens = start + tl.arange(0, BLOCK_T)
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    if MASKED:
        pages = tl.load(page_row + tokens // PAGE_SIZE, mask=tokens < seq_len, other=0)
    else:
        pages = tl.load(page_row + tokens // PAGE_SIZE)
    slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
    where = slots[:, None] * token_stride + kv_head * HEAD_DIM + dims[None, :]
    if MASKED or BLOCK_D != HEAD_DIM:
        inside = (tokens < seq_len)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + where, mask=inside, other=0.0).to(q.dtype)
    else:
        k = tl.load(k_ptr + where).to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if logit_cap > 0:
        ratio = logits / (logit_cap * LOG2_E)
        logits = logit_cap * LOG2_E * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)
    if MASKED:
        seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(logits - safe[:, None])
    carry = tl.exp2(best - safe)
    total = total * carry + tl.sum(weights, axis=1)
    if MASKED or BLOCK_D != HEAD_DIM:
        v = tl.load(v_ptr + where, mask=inside, other=0.0).to(q.dtype)
    else:
        v = tl.load(v_ptr + where).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * carry[:, None], input_precision="ieee")
    return acc, total, new_best


# A stride or a count that grows with the context is not written into the kernel: each variant would compile anew.
@triton.jit(do_not_specialize=["page_table_stride"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    out_scale,
    page_table_stride,
    q_stride,
    logit_cap: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program owns BLOCK_Q queries of one head of one request. Late (long) query blocks start first."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    query_begin = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_begin
    num_blocks = tl.cdiv(query_len, BLOCK_Q)
    block = num_blocks - 1 - tl.program_id(0)
    if block < 0:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    offsets = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    live = offsets < query_len
    first_position = seq_len - query_len + block * BLOCK_Q
    positions = first_position + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (query_begin + offsets).to(tl.int64)[:, None]
    q = tl.load(q_ptr + rows * q_stride + head * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    best = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    page_row = page_table_ptr + request * page_table_stride
    scale_2 = scale * LOG2_E

    begin = 0
    if WINDOW > 0:
        # Nothing before the first query's window is read, masked or not: its pages may be another's by now.
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    whole = first_position // BLOCK_T * BLOCK_T  # blocks before it are visible to every query of this program
    if WINDOW > 0:
        whole = begin
    for start in range(begin, whole, BLOCK_T):
        acc, total, best = _attend(
            acc, total, best, q, k_ptr, v_ptr, page_row, positions, start, seq_len, kv_head, scale_2,
            logit_cap, WINDOW, False, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_T,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_T):
        acc, total, best = _attend(
            acc, total, best, q, k_ptr, v_ptr, page_row, positions, start, seq_len, kv_head, scale_2,
            logit_cap, WINDOW, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_T,
        )  # fmt: skip
    if HAS_SINKS:  # before a row's first key `best` is -inf; such rows are not stored
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += tl.exp2(sink - best)
    out_where = rows * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_where, (acc * (out_scale / total)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


_prefill = QuickLaunch(_prefill_kernel)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Choices of one launch: queries and keys that a program takes at once."""

    block_q: int
    block_t: int
    num_warps: int
    num_stages: int


TILE = PrefillTile(128, 64, 8, 3)
FLOAT32_TILE = PrefillTile(32, 32, 8, 1)
"""float32 is multiplied exactly, by the lanes and not by matrix units, whose operands fill registers: with heads of 128
`TILE` keeps 17 KB a thread in local memory, this one nothing."""
SMALL_TILES = (
    PrefillTile(64, 32, 8, 3),
    PrefillTile(32, 32, 4, 3),
    PrefillTile(16, 16, 4, 3),
    PrefillTile(16, 16, 4, 1),
)
"""Not measured: for heads too wide for the others, the first of 256 where a program may have 99 KiB, without spills."""
EXTRA_BYTES = 1024
"""More than what rows exchange through shared memory, and the page numbers of a loop's blocks."""


def choose_prefill_tile(q: torch.Tensor, keys: torch.Tensor, limit: int) -> PrefillTile:
    """By the dtype, and by what fits.

    Args:
        q: [T, Hq, D]. keys: [pages, page_size, Hk, D].
        limit: shared memory that one program may have, bytes.
    """
    block_d = power_of_2(q.shape[2])

    def needed(tile: PrefillTile) -> int:
        # A loop over pages reads twice, page numbers and what lies there, so that half of its stages hold the latter:
        # keys and values, of which a loop of one stage holds but one at a time.
        ahead = 2 * copies((tile.num_stages + 1) // 2, limit) if tile.num_stages > 1 else 1
        operands = tile.block_q * q.element_size() + ahead * tile.block_t * keys.element_size()
        return operands * block_d + tile.block_q * tile.block_t * q.element_size() + EXTRA_BYTES

    return fitting((FLOAT32_TILE if q.dtype == torch.float32 else TILE, *SMALL_TILES), needed, limit)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    tile: PrefillTile | None = None,
    out_scale: float = 1.0,
    is_padded: bool = False,
    limit: int = NO_LIMIT,
) -> torch.Tensor:
    """q [T, Hq, D], keys and values [pages, page_size, Hk, D], page_table [R, P] int32, query_start [R + 1] int32,
    seq_lens [R] int32 -> [T, Hq * D].

    Args:
        window: tokens that a query sees, itself included; pages before the first query's are not read.
        sinks: [Hq] float32.
        tile: None = `choose_prefill_tile`.
        is_padded: rows past query_start[R] are wanted, as zeros.
        limit: shared memory that one program may have, for the choice.
    """
    tile = tile or choose_prefill_tile(q, keys, limit)
    num_tokens, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = keys.shape
    out = (q.new_zeros if is_padded else q.new_empty)((num_tokens, num_heads * head_dim))
    grid = (ceil_div(max_query_len, tile.block_q), num_heads, seq_lens.shape[0])
    _prefill[grid](
        q,
        keys,
        values,
        page_table,
        query_start,
        seq_lens,
        sinks,
        out,
        scale,
        out_scale,
        page_table.stride(0),
        q.stride(0),
        logit_cap=logit_cap or 0.0,
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_Q=tile.block_q,
        BLOCK_T=tile.block_t,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
