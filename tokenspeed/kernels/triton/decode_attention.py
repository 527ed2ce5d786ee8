"""Paged decode attention: one query token a request, split over the context, one kernel.

Formula   o[h] = softmax(scale * q[h] . K[j]) V over the context j (all, or the last `window`); optional sink logit of a
          head, joined to the denominator; optional cap: logit = cap * tanh(logit / cap)
Bytes     2 * context * num_kv_heads * head_dim * 2 a request and layer; each key and value is read once for all
          query heads of its group. Operations 4 * context * num_heads * head_dim.
Bound     the KV bytes at 4.26 TB/s on an H200.

Work is split by (request, kv head, split). Every program leaves an unnormalised partial with its maximum and sum; the
last of a (request, kv head) to arrive merges them in order of the splits. Lengths are read on the device, so one
recorded graph serves every context.

Early     A tile with `early` blocks reads lengths, page numbers and its first keys and values before it waits for the
          launch before it (programmatic dependent launch), all but the newest token's; that row is read after the wait.
          What makes this safe:
          * Launch N begins when every program of launch N - 1 has let it (gdc_launch_dependents) or ended. Launch N - 1
            is the one that rotates and stores (`pointwise.qkv_rope_cache`, 8-bit pools included). Every program of it
            waits for launch N - 2 before it lets launch N begin, so N - 2 is over, and with it all before: each launch
            waits for its predecessor before it ends. Or launch N - 1 is an ordinary one (another implementation of
            that op), which begins when all before it is over.
          * Launch N - 1 writes queries and each row's newest keys and values, nothing else that is read here. A row is
            one token of a request, and no row's newest token is in the context of another row of the step.
          So a caller whose preceding launch writes older keys or values, lengths, page numbers or sinks must not use
          such a tile. Early reads pass L1 by (.cg): it holds no stale line after the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.gpu import copies, fitting
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2
from tokenspeed.kernels.triton.prefetch import prefetch_l2

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _where(
    table_row,
    start,
    last,
    kv_head,
    dims,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Offsets of `dims` of BLOCK_T tokens from `start` on, [T, len(dims)] int64; those from `last` on mean nothing.
    ONE_PAGE: no block lies in two pages."""
    if ONE_PAGE:
        page = tl.load(table_row + start // PAGE_SIZE, mask=start < last, other=0, cache_modifier=CACHE)
        slot = page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE
        block = tl.arange(0, BLOCK_T)[:, None] * TOKEN_STRIDE + dims[None, :]
        where = slot * TOKEN_STRIDE + kv_head * HEAD_DIM + block
    else:
        tokens = start + tl.arange(0, BLOCK_T)
        pages = tl.load(table_row + tokens // PAGE_SIZE, mask=tokens < last, other=0, cache_modifier=CACHE)
        slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
        where = slots[:, None] * TOKEN_STRIDE + kv_head * HEAD_DIM + dims[None, :]
    return where


@triton.jit
def _power(x, BASE_2: tl.constexpr):
    """2 ** x, one instruction, or e ** x, which is four."""
    if BASE_2:
        y = tl.exp2(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def _attend(q, k, v, live, best, total, acc, scale, logit_cap: tl.constexpr, BASE_2: tl.constexpr):
    """A block of tokens, of which the `live` ones count, joins the running softmax. BASE_2: `scale` is times log2(e),
    unless there is a cap; `best` is."""
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if logit_cap > 0:
        ratio = logits / logit_cap
        logits = logit_cap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)
        if BASE_2:
            logits *= LOG2E
    logits = tl.where(live[None, :], logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = _power(logits - safe[:, None], BASE_2)
    carry = _power(best - safe, BASE_2)
    total = total * carry + tl.sum(weights, axis=1)
    acc = acc * carry[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _merge_in_turn(
    partial_ptr,
    stats_ptr,
    first,
    count,
    best,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BASE_2: tl.constexpr,
):
    """Sums and accumulators of partials first .. first + count, one after the other; `best` [BLOCK_H] holds sinks."""
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    inner = tl.arange(0, BLOCK_H)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    for other in range(count):
        base = first + other
        other_best = tl.load(stats_ptr + base * 2 * BLOCK_H + tl.arange(0, BLOCK_H), cache_modifier=".cg")
        other_total = tl.load(stats_ptr + base * 2 * BLOCK_H + BLOCK_H + tl.arange(0, BLOCK_H), cache_modifier=".cg")
        part = tl.load(partial_ptr + base * BLOCK_H * BLOCK_D + inner, cache_modifier=".cg")
        new_best = tl.maximum(best, other_best)
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        carry = _power(best - safe, BASE_2)
        scale_other = _power(other_best - safe, BASE_2)
        total = total * carry + other_total * scale_other
        acc = acc * carry[:, None] + part * scale_other[:, None]
        best = new_best
    return total, acc


@triton.jit
def _merge_at_once(
    partial_ptr,
    stats_ptr,
    first,
    count,
    best,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
    BASE_2: tl.constexpr,
):
    """As `_merge_in_turn`, MERGE partials at a time and only the heads of the group; `best` [GROUP_P]."""
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((GROUP_P, BLOCK_D), dtype=tl.float32)
    members = tl.arange(0, GROUP_P)
    dims = tl.arange(0, BLOCK_D)
    for chunk in tl.range(0, count, MERGE, num_stages=1):
        others = chunk + tl.arange(0, MERGE)
        mine = (others < count)[:, None] & (members < GROUP)[None, :]
        rows = (first + others)[:, None, None] * BLOCK_H + members[None, :, None]
        parts = partial_ptr + rows * BLOCK_D + dims[None, None, :]
        stats = stats_ptr + (first + others)[:, None] * (2 * BLOCK_H) + members[None, :]
        part = tl.load(parts, mask=mine[:, :, None], other=0.0, cache_modifier=".cg")
        bests = tl.load(stats, mask=mine, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + BLOCK_H, mask=mine, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        carry = _power(best - safe, BASE_2)
        weights = _power(bests - safe[None, :], BASE_2)
        total = total * carry + tl.sum(totals * weights, axis=0)
        acc = acc * carry[:, None] + tl.sum(part * weights[:, :, None], axis=0)
        best = new_best
    return total, acc


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
    GROUP_P: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL and EARLY == 0:
        gdc_wait()
        gdc_launch_dependents()
    CACHE: tl.constexpr = ".cg" if EARLY > 0 else ""
    seq_len = tl.load(seq_lens_ptr + request, cache_modifier=CACHE)
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
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    ONE_PAGE: tl.constexpr = EARLY > 0 and WINDOW == 0 and PAGE_SIZE % BLOCK_T == 0
    table_row = page_table_ptr + request * page_table_stride
    # Heads of the result as it is stored: those of the tensor cores' block, or of the merge's.
    OWNERS: tl.constexpr = GROUP_P if NUM_SPLITS > 1 and MERGE > 1 else BLOCK_H
    owners = tl.arange(0, OWNERS)
    BASE_2: tl.constexpr = EARLY > 0
    if EARLY > 0:
        if logit_cap == 0:
            scale *= LOG2E
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + kv_head * GROUP + owners, mask=owners < GROUP, other=0.0).to(tl.float32) * LOG2E
        newest = seq_len - 1
        where = _where(
            table_row, first, last, kv_head, dims, TOKEN_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_T, ONE_PAGE, CACHE
        )
        tokens = first + tl.arange(0, BLOCK_T)
        known = (tokens < tl.minimum(last, newest))[:, None] & in_head[None, :]
        k = tl.load(k_ptr + where, mask=known, other=0.0, cache_modifier=CACHE)
        v = tl.load(v_ptr + where, mask=known, other=0.0, cache_modifier=CACHE)
        if EARLY == 2:
            where_2 = _where(
                table_row, first + BLOCK_T, last, kv_head, dims,
                TOKEN_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_T, ONE_PAGE, CACHE,
            )  # fmt: skip
            tokens_2 = tokens + BLOCK_T
            known_2 = (tokens_2 < tl.minimum(last, newest))[:, None] & in_head[None, :]
            k_2 = tl.load(k_ptr + where_2, mask=known_2, other=0.0, cache_modifier=CACHE)
            v_2 = tl.load(v_ptr + where_2, mask=known_2, other=0.0, cache_modifier=CACHE)
        if PDL:
            LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
            lines = tl.minimum(tl.arange(0, (BLOCK_D + LINE - 1) // LINE) * LINE, HEAD_DIM - 1)
            for block in tl.static_range(EARLY, EARLY + AHEAD):
                start = first + block * BLOCK_T
                if start < last:
                    ahead = _where(
                        table_row, start, last, kv_head, lines,
                        TOKEN_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_T, ONE_PAGE, CACHE,
                    )  # fmt: skip
                    prefetch_l2((k_ptr + ahead).to(tl.int64, bitcast=True))
                    prefetch_l2((v_ptr + ahead).to(tl.int64, bitcast=True))
            gdc_wait()
            gdc_launch_dependents()

    best = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    q_row = q_ptr + request.to(tl.int64) * q_stride
    q = tl.load(q_row + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_group[:, None] & in_head[None, :], other=0.0)
    if EARLY > 0:
        fresh = ((tokens == newest) & (tokens < last))[:, None] & in_head[None, :]
        k = tl.load(k_ptr + where, mask=fresh, other=k, cache_modifier=CACHE)
        v = tl.load(v_ptr + where, mask=fresh, other=v, cache_modifier=CACHE)
        if EARLY == 2:
            fresh_2 = ((tokens_2 == newest) & (tokens_2 < last))[:, None] & in_head[None, :]
            k_2 = tl.load(k_ptr + where_2, mask=fresh_2, other=k_2, cache_modifier=CACHE)
            v_2 = tl.load(v_ptr + where_2, mask=fresh_2, other=v_2, cache_modifier=CACHE)
        best, total, acc = _attend(q, k, v, tokens < last, best, total, acc, scale, logit_cap, BASE_2)
        if EARLY == 2:
            best, total, acc = _attend(q, k_2, v_2, tokens_2 < last, best, total, acc, scale, logit_cap, BASE_2)
    for start in range(first + EARLY * BLOCK_T, last, BLOCK_T):
        live = start + tl.arange(0, BLOCK_T) < last
        where = _where(table_row, start, last, kv_head, dims, TOKEN_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_T, ONE_PAGE, "")
        mask = live[:, None] & in_head[None, :]
        k = tl.load(k_ptr + where, mask=mask, other=0.0)
        v = tl.load(v_ptr + where, mask=mask, other=0.0)
        best, total, acc = _attend(q, k, v, live, best, total, acc, scale, logit_cap, BASE_2)

    row = request.to(tl.int64) * NUM_KV_HEADS + kv_head
    out_where = out_ptr + (row * GROUP + owners)[:, None] * HEAD_DIM + dims[None, :]
    out_mask = (owners < GROUP)[:, None] & in_head[None, :]
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            if EARLY == 0:
                sink = tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32)
            total += _power(sink - best, BASE_2)
        share = tl.where(total == 0, 0.0, out_scale / total)  # nothing attended: a row without context
        tl.store(out_where, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        return

    kept = tl.full((BLOCK_H,), True, dtype=tl.int1)
    if MERGE > 1:  # nobody reads the others
        kept = in_group
    inner = tl.arange(0, BLOCK_H)[:, None] * BLOCK_D + dims[None, :]
    own = row * NUM_SPLITS + split
    tl.store(partial_ptr + own * BLOCK_H * BLOCK_D + inner, acc, mask=kept[:, None])
    tl.store(stats_ptr + own * 2 * BLOCK_H + tl.arange(0, BLOCK_H), best, mask=kept)
    tl.store(stats_ptr + own * 2 * BLOCK_H + BLOCK_H + tl.arange(0, BLOCK_H), total, mask=kept)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if arrived == num_working - 1:
        tl.store(counter_ptr + row, 0)
        sinks = tl.full((OWNERS,), float("-inf"), dtype=tl.float32)
        if HAS_SINKS:
            if EARLY == 0:
                sink = tl.load(sinks_ptr + kv_head * GROUP + owners, mask=owners < GROUP, other=0.0).to(tl.float32)
            sinks = sink
        first_part = row * NUM_SPLITS
        if MERGE > 1:
            whole, result = _merge_at_once(
                partial_ptr, stats_ptr, first_part, num_working, sinks, GROUP, GROUP_P, BLOCK_H, BLOCK_D, MERGE, BASE_2
            )
        else:
            whole, result = _merge_in_turn(
                partial_ptr, stats_ptr, first_part, num_working, sinks, BLOCK_H, BLOCK_D, BASE_2
            )
        share = tl.where(whole == 0, 0.0, out_scale / whole)
        tl.store(out_where, (result * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


_decode = QuickLaunch(_decode_kernel)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Choices of one launch.

    Fields:
        num_splits: programs that may share the context of a (request, kv head).
        block_t: tokens that a program reads at once.
        least_blocks: blocks that a program takes at least, as long as there are; programs without any return at once.
        early: blocks (0, 1 or 2) that a program reads into registers before it waits for the launch before; see the
            module for what that launch may be.
        ahead: blocks after those that it brings into L2 before it waits.
        merge: partials that are merged at once, a power of two; fewer where the heads of a group leave no room.
    """

    num_splits: int
    block_t: int
    num_warps: int
    num_stages: int
    least_blocks: int = 1
    early: int = 0
    ahead: int = 0
    merge: int = 1


MERGE_REGISTERS = 128
"""Of a thread, for the partials that it merges at once."""


def decode_constants(
    num_heads: int,
    keys: torch.Tensor,
    tile: DecodeTile,
    window: int | None,
    has_sinks: bool,
    logit_cap: float | None,
    pdl: bool,
) -> dict[str, object]:
    """What the kernel is compiled for; keys [pages, page_size, Hk, D]."""
    _, page_size, num_kv_heads, head_dim = keys.shape
    group_p = power_of_2(num_heads // num_kv_heads)
    block_d = power_of_2(head_dim)
    room = MERGE_REGISTERS * 32 * tile.num_warps // (group_p * block_d)
    return {
        "logit_cap": logit_cap or 0.0,
        "WINDOW": window or 0,
        "HAS_SINKS": has_sinks,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "GROUP_P": group_p,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "PAGE_SIZE": page_size,
        "BLOCK_H": max(16, group_p),
        "BLOCK_T": tile.block_t,
        "NUM_SPLITS": tile.num_splits,
        "LEAST_BLOCKS": tile.least_blocks,
        "EARLY": tile.early,
        "AHEAD": tile.ahead,
        "MERGE": max(1, min(tile.merge, room, power_of_2(tile.num_splits))),
        "PDL": pdl,
    }


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
        workspace: (partials float32, stats float32, counters int32 zeros), as large as `decode_workspace` or larger.
        out_scale: factor on the result, the scale of an 8-bit pool's values.
        tile: see `choose_decode_tile`; one split needs no workspace.
        window: tokens that a query sees, itself included; pages before it are not read.
        sinks: [Hq] float32.
    """
    num_requests, num_heads, head_dim = q.shape
    out = q.new_empty(num_requests, num_heads * head_dim)
    partials, stats, counters = workspace
    _decode[(num_requests, keys.shape[2], tile.num_splits)](
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
        **decode_constants(num_heads, keys, tile, window, sinks is not None, logit_cap, pdl),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    return out


NARROW_HEAD = 64
WIDEST_EARLY_HEAD = 128
"""Blocks of wider heads do not fit into the registers."""
EARLY_ONE = DecodeTile(32, 64, 4, 3, early=1, merge=16)
EARLY_ONE_NARROW = DecodeTile(32, 32, 1, 3, early=1, merge=8)
EARLY_FEW = DecodeTile(2, 64, 4, 3, least_blocks=5, early=1, ahead=1)
EARLY_TWO = DecodeTile(1, 64, 4, 3, early=2, ahead=1)
EARLY_THREE = DecodeTile(1, 64, 4, 3, early=1, ahead=1)
EARLY_MANY = DecodeTile(1, 64, 2, 3, early=1, ahead=1)
NARROW_FEW = DecodeTile(2, 64, 2, 3, least_blocks=5, early=1, ahead=1)
TILES: tuple[tuple[int, DecodeTile, DecodeTile], ...] = (
    (8, EARLY_ONE_NARROW, EARLY_ONE),
    (32, DecodeTile(16, 128, 4, 3, least_blocks=1), DecodeTile(16, 32, 4, 5, least_blocks=4)),
    (64, DecodeTile(8, 64, 2, 5, least_blocks=4), DecodeTile(8, 64, 4, 3, least_blocks=3)),
    (128, DecodeTile(3, 128, 4, 3, least_blocks=1), DecodeTile(8, 64, 4, 3, least_blocks=3)),
    (240, NARROW_FEW, EARLY_FEW),
    (264, NARROW_FEW, EARLY_TWO),
    (396, NARROW_FEW, EARLY_THREE),
    (528, EARLY_MANY, EARLY_MANY),
    (792, EARLY_MANY, EARLY_THREE),
    (2**31, EARLY_MANY, EARLY_MANY),
)
"""Up to so many (request, kv head) pairs: the tile for heads of up to 64 dimensions, and for wider ones. What measured
best on one H200 at a context of 600 (docs/log.md: sweeps of 155 and 379 variants, then one between their batches);
longer contexts get more splits, so that few requests still keep the memory busy. One split a pair comes in waves of
132 SMs times the programs that fit in one: two of `EARLY_TWO`, three of `EARLY_THREE`, four of `EARLY_MANY`. So 40
requests of 8 heads take 31 us by `EARLY_THREE` and 40 by `EARLY_TWO`, whose second wave is a fifth full."""

SHORT_WINDOW = 256
SHORT_WINDOW_TILE_BYTES = 128 * 64
MOST_EARLY_WINDOWS = 128
"""(request, kv head) pairs up to which a window that fits a block is read early; 512 of them lose by it."""


def choose_decode_tile(num_rows: int, head_dim: int, window: int | None) -> DecodeTile:
    """How `num_rows` (request, kv head) pairs are shared out. A short window is one piece of work, of a block or two,
    whatever the context; its loads are not pipelined, there is nothing to overlap them with."""
    if window is not None and window <= SHORT_WINDOW:
        most = max(16, SHORT_WINDOW_TILE_BYTES // power_of_2(head_dim))
        block_t = min(most, max(16, power_of_2(window)))
        if window > block_t:
            return DecodeTile(1, block_t, 4, 2)
        return DecodeTile(1, block_t, 4, 1, early=int(num_rows <= MOST_EARLY_WINDOWS))
    narrow, wide = next((narrow, wide) for most_rows, narrow, wide in TILES if num_rows <= most_rows)
    tile = narrow if head_dim <= NARROW_HEAD else wide
    if head_dim > WIDEST_EARLY_HEAD:
        tile = replace(tile, early=0, ahead=0)
    if window is not None:
        tile = replace(tile, num_splits=min(tile.num_splits, ceil_div(window, tile.block_t)))
    return tile


EXTRA_BYTES = 1024
"""More than what rows exchange through shared memory, and the page numbers of a loop's blocks."""
TALL_HEADS = 64
"""Heads of a group from which on Hopper's asynchronous tensor cores take them."""


def fitting_decode_tile(tile: DecodeTile, q: torch.Tensor, keys: torch.Tensor, limit: int) -> DecodeTile:
    """`tile`, or one that reads fewer blocks early, or shorter blocks, where a program may have `limit` bytes of shared
    memory only. q [R, Hq, D], keys [pages, page_size, Hk, D]. The number of splits, and so the workspace, stays."""
    block_d = power_of_2(q.shape[2])
    block_h = max(16, power_of_2(q.shape[1] // keys.shape[2]))

    def needed(a: DecodeTile) -> int:
        # See `choose_prefill_tile`. What is read early comes to the tensor cores by shared memory too.
        ahead = copies((a.num_stages + 1) // 2, limit if block_h >= TALL_HEADS else 0)
        blocks = 2 * max(ahead, a.early) * a.block_t * keys.element_size()
        return (block_h * q.element_size() + blocks) * block_d + block_h * a.block_t * q.element_size() + EXTRA_BYTES

    return fitting(_lighter_tiles(tile), needed, limit)


def _lighter_tiles(tile: DecodeTile) -> Iterator[DecodeTile]:
    yield tile
    if tile.early > 1:
        tile = replace(tile, early=1)
        yield tile
    while tile.block_t > 16:
        tile = replace(tile, block_t=tile.block_t // 2)
        yield tile


def decode_workspace(
    num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scratch for `decode_attention`; counters must be zero at the first call and are zero after each. One split
    touches none of it."""
    num_pairs = num_requests * num_kv_heads if num_splits > 1 else 0
    return _workspace(num_pairs, num_pairs * num_splits, num_heads, num_kv_heads, head_dim, device)


def shared_workspace(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for steps of any size whose tiles `choose_decode_tile` chose, one after the other on one stream: many
    pairs are split into few parts or none, so there is a most (8 MiB for 32 heads on 8 of 128 dimensions)."""
    split = [(most_pairs, tile.num_splits) for most_pairs, *tiles in TILES for tile in tiles if tile.num_splits > 1]
    num_pairs, num_parts = max(pairs for pairs, _ in split), max(pairs * splits for pairs, splits in split)
    return _workspace(num_pairs, num_parts, num_heads, num_kv_heads, head_dim, device)


def _workspace(
    num_pairs: int, num_parts: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For so many (request, kv head) pairs, of so many parts in all."""
    block_h = max(16, power_of_2(num_heads // num_kv_heads))
    return (
        torch.empty(num_parts * block_h * power_of_2(head_dim), dtype=torch.float32, device=device),
        torch.empty(num_parts * 2 * block_h, dtype=torch.float32, device=device),
        torch.zeros(num_pairs, dtype=torch.int32, device=device),
    )
