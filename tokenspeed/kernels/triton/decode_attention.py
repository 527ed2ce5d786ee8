"""Paged decode attention: one query token a request, split over the context, one kernel.

Formula   o[h] = softmax(scale * q[h] . K[j]) V over the context j (all, or the last `window`); optional sink logit of a
          head, joined to the denominator; optional cap: logit = cap * tanh(logit / cap)
Bytes     2 * context * num_kv_heads * head_dim * 2 a request and layer; each key and value is read once for all
          query heads of its group. Operations 4 * context * num_heads * head_dim.
Bound     the KV bytes at 4.26 TB/s on an H200.

Work is split by (request, kv head, split). Every program leaves an unnormalised partial with its maximum and sum; the
last of a (request, kv head) to arrive merges them in order of the splits. Lengths are read on the device, so one
recorded graph serves every context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# A stride or a count that grows with the context is not written into the kernel: each variant would compile anew.
@triton.jit(do_not_specialize=["page_table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    scale,
    out_scale,
    page_table_stride,
    q_stride,
    logit_cap: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + request)
    begin = 0
    if WINDOW > 0:
        # Nothing before the window is read, masked or not: its pages may be another's by now, and 0 * NaN is NaN.
        begin = tl.maximum(seq_len - WINDOW, 0)
    num_blocks = tl.cdiv(seq_len - begin, BLOCK_T)
    per_split = tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), LEAST_BLOCKS)
    num_working = tl.maximum(tl.cdiv(num_blocks, per_split), 1)
    if split >= num_working:  # a short context is not worth all the splits that a long one needs
        return
    first = begin + split * per_split * BLOCK_T
    last = tl.minimum(first + per_split * BLOCK_T, seq_len)

    heads = kv_head * GROUP + tl.arange(0, BLOCK_H)
    in_group = tl.arange(0, BLOCK_H) < GROUP
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    best = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    q_row = q_ptr + request.to(tl.int64) * q_stride
    q = tl.load(q_row + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_group[:, None] & in_head[None, :], other=0.0)
    for start in range(first, last, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        live = tokens < last
        pages = tl.load(page_table_ptr + request * page_table_stride + tokens // PAGE_SIZE, mask=live, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
        where = slots[:, None] * token_stride + kv_head * HEAD_DIM + dims[None, :]
        mask = live[:, None] & in_head[None, :]
        k = tl.load(k_ptr + where, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + where, mask=mask, other=0.0).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if logit_cap > 0:
            ratio = logits / logit_cap
            logits = logit_cap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)
        logits = tl.where(live[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, axis=1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(logits - safe[:, None])
        carry = tl.exp(best - safe)
        total = total * carry + tl.sum(weights, axis=1)
        acc = acc * carry[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best

    row = request.to(tl.int64) * NUM_KV_HEADS + kv_head
    out_where = out_ptr + (row * GROUP + tl.arange(0, BLOCK_H))[:, None] * HEAD_DIM + dims[None, :]
    out_mask = in_group[:, None] & in_head[None, :]
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32)
            total += tl.exp(sink - best)
        share = tl.where(total == 0, 0.0, out_scale / total)  # nothing attended: a row without context
        tl.store(out_where, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        return

    inner = tl.arange(0, BLOCK_H)[:, None] * BLOCK_D + dims[None, :]
    own = row * NUM_SPLITS + split
    tl.store(partial_ptr + own * BLOCK_H * BLOCK_D + inner, acc)
    tl.store(stats_ptr + own * 2 * BLOCK_H + tl.arange(0, BLOCK_H), best)
    tl.store(stats_ptr + own * 2 * BLOCK_H + BLOCK_H + tl.arange(0, BLOCK_H), total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if arrived == num_working - 1:
        tl.store(counter_ptr + row, 0)
        best = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
        if HAS_SINKS:
            best = tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32)
        total = tl.where(best == float("-inf"), 0.0, 1.0)
        acc = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
        for other in range(num_working):
            base = row * NUM_SPLITS + other
            other_best = tl.load(stats_ptr + base * 2 * BLOCK_H + tl.arange(0, BLOCK_H), cache_modifier=".cg")
            other_total = tl.load(
                stats_ptr + base * 2 * BLOCK_H + BLOCK_H + tl.arange(0, BLOCK_H), cache_modifier=".cg"
            )
            part = tl.load(partial_ptr + base * BLOCK_H * BLOCK_D + inner, cache_modifier=".cg")
            new_best = tl.maximum(best, other_best)
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            carry = tl.exp(best - safe)
            scale_other = tl.exp(other_best - safe)
            total = total * carry + other_total * scale_other
            acc = acc * carry[:, None] + part * scale_other[:, None]
            best = new_best
        share = tl.where(total == 0, 0.0, out_scale / total)
        tl.store(out_where, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Choices of one launch.

    Fields:
        num_splits: programs that may share the context of a (request, kv head).
        block_t: tokens that a program reads at once.
        least_blocks: blocks that a program takes at least, as long as there are; programs without any return at once.
    """

    num_splits: int
    block_t: int
    num_warps: int
    num_stages: int
    least_blocks: int = 1


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile: DecodeTile,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    pdl: bool = True,
    out_scale: float = 1.0,
) -> torch.Tensor:
    """q [R, Hq, D] (last two dims contiguous), keys and values [pages, page_size, Hk, D], page_table [R, P] int32,
    seq_lens [R] int32 -> [R, Hq * D].

    Args:
        workspace: (partials float32, stats float32, counters int32 zeros); see `decode_workspace`.
        out_scale: factor on the result, the scale of an 8-bit pool's values.
        tile: see `choose_decode_tile`; one split needs no workspace.
        window: tokens that a query sees, itself included; pages before it are not read.
        sinks: [Hq] float32.
    """
    _, page_size, num_kv_heads, head_dim = keys.shape
    num_requests, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    out = q.new_empty(num_requests, num_heads * head_dim)
    partials, stats, counters = workspace
    _decode_kernel[(num_requests, num_kv_heads, tile.num_splits)](
        q,
        keys,
        values,
        page_table,
        seq_lens,
        sinks,
        out,
        partials,
        stats,
        counters,
        scale,
        out_scale,
        page_table.stride(0),
        q.stride(0),
        logit_cap=logit_cap or 0.0,
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)),
        BLOCK_T=tile.block_t,
        NUM_SPLITS=tile.num_splits,
        LEAST_BLOCKS=tile.least_blocks,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    return out


NARROW_HEAD = 64
TILES: tuple[tuple[int, DecodeTile, DecodeTile], ...] = (
    (8, DecodeTile(32, 64, 2, 5, least_blocks=1), DecodeTile(32, 32, 4, 5, least_blocks=2)),
    (32, DecodeTile(16, 128, 4, 3, least_blocks=1), DecodeTile(16, 32, 4, 5, least_blocks=4)),
    (128, DecodeTile(8, 64, 2, 5, least_blocks=4), DecodeTile(8, 64, 4, 3, least_blocks=3)),
    (511, DecodeTile(4, 64, 4, 3, least_blocks=5), DecodeTile(4, 64, 4, 3, least_blocks=5)),
    (2**31, DecodeTile(1, 32, 2, 5), DecodeTile(1, 64, 2, 3)),
)
"""Up to so many (request, kv head) pairs: the tile for heads of up to 64 dimensions, and for wider ones. The number of
splits that work at a context of 600 measured best on one H200 (docs/log.md, sweep of 155 variants); longer contexts get
more, so that few requests still keep the memory busy."""

SHORT_WINDOW = 256
SHORT_WINDOW_TILE_BYTES = 128 * 64


def choose_decode_tile(num_rows: int, head_dim: int, window: int | None) -> DecodeTile:
    """How `num_rows` (request, kv head) pairs are shared out. A short window is one piece of work, of a block or two,
    whatever the context; its loads are not pipelined, there is nothing to overlap them with."""
    if window is not None and window <= SHORT_WINDOW:
        most = max(16, SHORT_WINDOW_TILE_BYTES // triton.next_power_of_2(head_dim))
        block_t = min(most, max(16, triton.next_power_of_2(window)))
        return DecodeTile(1, block_t, 4, 1 if window <= block_t else 2)
    narrow, wide = next((narrow, wide) for most_rows, narrow, wide in TILES if num_rows <= most_rows)
    tile = narrow if head_dim <= NARROW_HEAD else wide
    if window is not None:
        tile = replace(tile, num_splits=min(tile.num_splits, triton.cdiv(window, tile.block_t)))
    return tile


def decode_workspace(
    num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scratch for `decode_attention`; counters must be zero at the first call and are zero after each."""
    block_h = max(16, triton.next_power_of_2(num_heads // num_kv_heads))
    rows = num_requests * num_kv_heads * num_splits
    return (
        torch.empty(rows * block_h * triton.next_power_of_2(head_dim), dtype=torch.float32, device=device),
        torch.empty(rows * 2 * block_h, dtype=torch.float32, device=device),
        torch.zeros(num_requests * num_kv_heads, dtype=torch.int32, device=device),
    )
