"""Experts for the few tokens of a decode step, without tensor cores: two launches that read each chosen expert once.

Formula   h[t, k] = activation(W_gate_up[e] x[t] + b), out[t] = sum over k of weight[t, k] (W_down[e] h[t, k] + b)
          with e = expert_ids[t, k], read on the device
Bytes     tokens * top_k * 3 * I * H * (2 for bf16, 17 / 32 for MXFP4); tokens that share an expert read it from L2.
Bound     the weight bytes at 4.26 TB/s on an H200; for MXFP4 also the instructions: 19 unpack 8 values, 8 multiply, x
          and addresses take 7 to 11, so that 100 million values (53 MB, 12.4 us) keep all schedulers busy for 14 us.

Both launches use programmatic dependent launch. The first waits before it reads anything, because the experts come from
the launch before it; the second may read expert_ids at once, because it starts only after the first has waited.

MXFP4 lies in memory as `moe_mxfp4` leaves it: 8 values a word, of which two at a time become a pair of bfloat16 by
shifts and masks alone. From there a float32 is one more instruction, and meets x without a multiplication by the scale,
which comes once for the 32 values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.moe_mxfp4 import pack_mxfp4
from tokenspeed.moe.interface import Activation, ExpertWeights

_MASK = tl.constexpr(0x81C081C0 - 2**32)
_SIGN = tl.constexpr(0x80008000 - 2**32)
_HIGH = tl.constexpr(0xFFFF0000 - 2**32)


@triton.jit
def _mxfp4_pairs(words):
    """int32 words of `moe_mxfp4` -> for slots 0 to 3 an int32 with two bfloat16, the values times 2 ** -126."""
    last = ((words << 1) & _SIGN) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
    return words & _MASK, (words << 3) & _MASK, (words << 6) & _MASK, last


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One layer's experts as these kernels read them.

    dense  gate_up [E, 2I, H], down [E, H, I] in the model's dtype; scales None
    mxfp4  codes gate_up int32 [E, 2I, H / 8], down int32 [E, H, I / 8]; scales int32 [E, ceil(H / 128), 2I],
           [E, ceil(I / 128), H]: see `moe_mxfp4`; H and I are multiples of 32
    Rows of gate_up are interleaved, biases [E, 2I] and [E, H] or None: see `moe.interface.ExpertWeights`.
    """

    format: Literal["dense", "mxfp4"]
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.gate_up.shape[1] // 2


def pack_experts(weights: ExpertWeights) -> PackedExperts:
    """Take over contiguous weights in format dense or mxfp4; MXFP4 codes are rearranged where they lie.

    Raises:
        ValueError: another format.
        CheckpointError: see `pack_mxfp4`.
    """
    biases = weights.gate_up_bias, weights.down_bias
    if weights.format == "dense":
        return PackedExperts("dense", weights.gate_up, weights.down, None, None, *biases)
    if weights.format != "mxfp4" or weights.gate_up_scale is None or weights.down_scale is None:
        raise ValueError(f"experts in {weights.format} have no GEMV kernel; dense, and mxfp4 with its scales, have one")
    gate_up = pack_mxfp4(weights.gate_up, weights.gate_up_scale, "gate_up of the experts")
    down = pack_mxfp4(weights.down, weights.down_scale, "down of the experts")
    return PackedExperts("mxfp4", gate_up.codes, down.codes, gate_up.scales, down.scales, *biases)


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and columns (values, not words) of a program's step, warps, and programs that share an output
    (`split`, gemv_down only)."""

    rows: int
    cols: int
    num_warps: int
    split: int = 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of `gemv_down`, shared by every call on one stream: float32 partials, and int32 counters that are zero
    between calls."""

    partials: torch.Tensor
    counters: torch.Tensor


def make_workspace(device: torch.device) -> Workspace:
    return Workspace(
        torch.empty(1 << 20, dtype=torch.float32, device=device), torch.zeros(4096, dtype=torch.int32, device=device)
    )


@triton.jit
def _load_tile(
    w_ptr, scale_ptr, expert, rows, start, live,
    NUM_ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MXFP4: tl.constexpr,
):  # fmt: skip
    """Weights of an expert's rows from column `start`, and their scales: dense [N, BLOCK_K] and nothing of use, MXFP4
    words [N, BLOCK_K / 8] and words of scales [N, BLOCK_K / 32]. Outside the matrix, or when not `live`, nothing is
    read."""
    inside = rows < tl.where(live, NUM_ROWS, 0)
    if MXFP4:
        at = start // 8 + tl.arange(0, BLOCK_K // 8)
        mask = inside[:, None] & (at < K // 8)[None, :]
        # What is masked out is undefined, but no word is infinite or NaN, and its x is zero.
        w = tl.load(w_ptr + expert * (NUM_ROWS * (K // 8)) + (rows * (K // 8))[:, None] + at[None, :], mask=mask)
        # Neighbouring rows of scales are neighbours in memory, but a thread has to have the scales of its words. So the
        # compiler is told that columns are neighbours, which chooses the layout of the words, and not told that
        # scale_ptr is aligned, so that it does not read two at a time. Otherwise all scales go through shared memory.
        blocks = start // 32 + tl.arange(0, BLOCK_K // 32)
        mask = inside[:, None] & (blocks < K // 32)[None, :]
        at = tl.max_contiguous((blocks // 4 * NUM_ROWS)[None, :] + rows[:, None], (1, 2))
        scale = tl.load(scale_ptr + expert * (NUM_ROWS * ((K + 127) // 128)) + at, mask=mask, other=0)
    else:
        cols = start + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (cols < K)[None, :]
        w = tl.load(w_ptr + expert * (NUM_ROWS * K) + (rows * K)[:, None] + cols[None, :], mask=mask, other=0.0)
        scale = w
    return w, scale


@triton.jit
def _add_pair(part, pair, x_at, inside, factor, X_KIND: tl.constexpr):
    """part + two values of each word times their x: [N, words]."""
    both = tl.load(x_at, mask=inside, other=0)
    if X_KIND == "bfloat16":
        x_low = (both << 16).to(tl.float32, bitcast=True)
        x_high = (both & _HIGH).to(tl.float32, bitcast=True)
    elif X_KIND == "float16":
        x_low = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x_high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x_low = both.to(tl.int32).to(tl.float32, bitcast=True)
        x_high = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    part = tl.fma((pair << 16).to(tl.float32, bitcast=True), tl.broadcast_to(x_low * factor, part.shape), part)
    return tl.fma((pair & _HIGH).to(tl.float32, bitcast=True), tl.broadcast_to(x_high * factor, part.shape), part)


@triton.jit
def _add_tile(
    acc, w, scale, x_ptr, start, factor,
    K: tl.constexpr, BLOCK_K: tl.constexpr, MXFP4: tl.constexpr, X_KIND: tl.constexpr,
):  # fmt: skip
    """acc + weights * x * factor, not yet summed over columns."""
    if MXFP4:
        # x comes as pairs of neighbours: pair q of slot s of block b is 16 b + 4 s + q, word 4 b + q has its weights.
        words = start // 8 + tl.arange(0, BLOCK_K // 8)
        inside = (words < K // 8)[None, :]
        x_at = x_ptr + (words // 4 * 16 + words % 4)[None, :]
        first, second, third, fourth = _mxfp4_pairs(w)
        part = _add_pair(tl.zeros(w.shape, dtype=tl.float32), first, x_at, inside, factor, X_KIND)
        part = _add_pair(part, second, x_at + 4, inside, factor, X_KIND)
        part = _add_pair(part, third, x_at + 8, inside, factor, X_KIND)
        part = _add_pair(part, fourth, x_at + 12, inside, factor, X_KIND)
        part = tl.sum(tl.reshape(part, (w.shape[0], BLOCK_K // 32, 4)), axis=2)
        byte = (start // 32 + tl.arange(0, BLOCK_K // 32)) % 4
        power = ((scale >> (byte * 8)[None, :]) & 255) << 23
        acc = tl.fma(part, power.to(tl.float32, bitcast=True), acc)
    else:
        cols = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32) * factor
        acc += w.to(tl.float32) * x
    return acc


@triton.jit
def _rows_of_experts(
    x_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, rows, first, last,
    NUM_ROWS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MXFP4: tl.constexpr, X_KIND: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum over steps first..last of W[rows, step's columns] @ x, float32 [BLOCK_N]. Step s is columns (s % steps) *
    BLOCK_K of the expert ids[s // steps] and row s // steps of x, times that expert's weight where WEIGHTED.

    MXFP4: the values come times 2 ** -126 and scales with 2 ** 126. x goes in times 2 ** 64, so that no product of the
    two is subnormal, which would lose bits, unless x is below 2 ** -63, and no sum infinite unless it is above 2 ** 63.
    """
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    lift: tl.constexpr = 2.0**64 if MXFP4 else 1.0
    X_ROW: tl.constexpr = K // 2 if MXFP4 else K
    if MXFP4:
        acc = tl.zeros((BLOCK_N, BLOCK_K // 32), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    expert = tl.load(ids_ptr + first // steps).to(tl.int64)
    w, scale = _load_tile(
        w_ptr, scale_ptr, expert, rows, first % steps * BLOCK_K, first < last, NUM_ROWS, K, BLOCK_K, MXFP4
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in range(first, last):
        following = step + 1
        more = following < last
        if WEIGHTED:
            expert = tl.load(ids_ptr + following // steps, mask=more, other=0).to(tl.int64)
        next_w, next_scale = _load_tile(
            w_ptr, scale_ptr, expert, rows, following % steps * BLOCK_K, more, NUM_ROWS, K, BLOCK_K, MXFP4
        )
        slot = step // steps
        start = step % steps * BLOCK_K
        factor = lift
        if WEIGHTED:
            factor = tl.load(weights_ptr + slot) * lift
        acc = _add_tile(acc, w, scale, x_ptr + slot * X_ROW, start, factor, K, BLOCK_K, MXFP4, X_KIND)
        w = next_w
        scale = next_scale
    return tl.sum(acc, axis=1) * (1.0 / lift)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])  # see `_load_tile`
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    h_ptr,
    limit,
    alpha,
    NUM_ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MXFP4: tl.constexpr,
    X_KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns BLOCK_N rows of gate_up, gate and up in turn, for one (token, expert) pair."""
    pair = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    X_ROW: tl.constexpr = K // 2 if MXFP4 else K
    y = _rows_of_experts(
        x_ptr + pair // TOP_K * X_ROW, w_ptr, scale_ptr, ids_ptr + pair, ids_ptr, rows, 0, steps,
        NUM_ROWS, K, BLOCK_N, BLOCK_K, MXFP4, X_KIND, False, False,
    )  # fmt: skip
    if HAS_BIAS:
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        y += tl.load(bias_ptr + expert * NUM_ROWS + rows, mask=rows < NUM_ROWS, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
    if CLAMPED:
        # A NaN stays one.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        h = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        h = gate * tl.sigmoid(gate) * up
    outs = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(h_ptr + pair * (NUM_ROWS // 2) + outs, h, mask=outs < NUM_ROWS // 2)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])  # see `_load_tile`
def _down_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    NUM_ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    MXFP4: tl.constexpr,
    X_KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPLIT programs own BLOCK_N outputs of one token; each takes a part of the way along its experts' columns, and
    the last to arrive adds the parts in their order, so the result does not depend on which one is last."""
    token = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < NUM_ROWS
    ids_ptr += token * TOP_K
    weights_ptr += token * TOP_K
    total: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * TOP_K
    span: tl.constexpr = (total + SPLIT - 1) // SPLIT
    first = tl.minimum(split * span, total - 1)
    last = tl.minimum(split * span + span, total)
    if split * span >= total:
        last = first
    X_ROW: tl.constexpr = K // 2 if MXFP4 else K
    y = _rows_of_experts(
        h_ptr + token * TOP_K * X_ROW, w_ptr, scale_ptr, ids_ptr, weights_ptr, rows, first, last,
        NUM_ROWS, K, BLOCK_N, BLOCK_K, MXFP4, X_KIND, True, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        once = rows < tl.where(split == 0, NUM_ROWS, 0)
        for k in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + k).to(tl.int64)
            bias = tl.load(bias_ptr + expert * NUM_ROWS + rows, mask=once, other=0.0).to(tl.float32)
            y += bias * tl.load(weights_ptr + k)
    where = out_ptr + token * NUM_ROWS + rows
    if SPLIT == 1:
        if ADD:
            y += tl.load(where, mask=live, other=0.0).to(tl.float32)
        tl.store(where, y.to(out_ptr.dtype.element_ty), mask=live)
        return
    group = token * tl.num_programs(1) + tile
    base = partial_ptr + group * SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(base + split * BLOCK_N, y)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
    if arrived == SPLIT - 1:
        tl.store(counter_ptr + group, 0)
        y = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for other in range(SPLIT):
            y += tl.load(base + other * BLOCK_N, cache_modifier=".cg")
        if ADD:
            y += tl.load(where, mask=live, other=0.0).to(tl.float32)
        tl.store(where, y.to(out_ptr.dtype.element_ty), mask=live)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Two neighbours as one integer, which a thread reads at once and takes apart without a conversion."""
    return x.view(torch.int64 if x.element_size() == 4 else torch.int32)


def _kind(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def gemv_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    packed: PackedExperts,
    activation: Activation,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """x [T, H] contiguous, expert_ids int32 [T, k] -> h [T * k, I] float32, the activation of every pair.

    Args:
        out: h, where not a new tensor.
        tile: None = chosen by shape.
        pdl: programmatic dependent launch, from compute capability 9.0 on.
    """
    top_k = expert_ids.shape[1]
    num_rows = packed.gate_up.shape[1]
    if out is None:
        out = x.new_empty(expert_ids.numel(), num_rows // 2, dtype=torch.float32)
    if tile is None:
        tile = choose_tile(packed.format, num_rows, packed.hidden_size, expert_ids.numel())
    _gate_up_kernel[(expert_ids.numel(), triton.cdiv(num_rows, tile.rows))](
        _pairs(x) if packed.format == "mxfp4" else x,
        packed.gate_up,
        packed.gate_up_scale,
        packed.gate_up_bias,
        expert_ids,
        out,
        activation.limit or 0.0,
        activation.alpha,
        NUM_ROWS=num_rows,
        K=packed.hidden_size,
        TOP_K=top_k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.cols,
        MXFP4=packed.format == "mxfp4",
        X_KIND=_kind(x),
        HAS_BIAS=packed.gate_up_bias is not None,
        CLAMPED=activation.limit is not None,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


def gemv_down(
    h: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    out: torch.Tensor,
    workspace: Workspace,
    add: bool = False,
    tile: Tile | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """out[t] (+)= sum over k of weights[t, k] * (down[expert_ids[t, k]] @ h[t, k] + bias); returns `out`.

    Args:
        h: [T * k, I] float32, from the `gemv_gate_up` launched just before on the same expert_ids: with `pdl` these are
            read before the launch before this one has ended.
        expert_ids, weights: [T, k] int32 and float32.
        out: [T, H], any float dtype. `add`: it holds a residual, to which the sum is added in place.
        tile: None = chosen by shape.
    Raises:
        ValueError: the tile needs more scratch than the workspace has.
    """
    num_tokens, top_k = expert_ids.shape
    num_rows = packed.hidden_size
    if tile is None:
        tile = choose_tile(packed.format, num_rows, packed.intermediate_size, num_tokens * top_k, top_k)
    groups = num_tokens * triton.cdiv(num_rows, tile.rows)
    if tile.split > 1:
        have = min(workspace.counters.numel(), workspace.partials.numel() // (tile.split * tile.rows))
        if groups > have:
            raise ValueError(f"{groups} output tiles, each of {tile.split} programs; the workspace has room for {have}")
    _down_kernel[(num_tokens, triton.cdiv(num_rows, tile.rows), tile.split)](
        _pairs(h) if packed.format == "mxfp4" else h,
        packed.down,
        packed.down_scale,
        packed.down_bias,
        expert_ids,
        weights,
        out,
        workspace.partials,
        workspace.counters,
        NUM_ROWS=num_rows,
        K=packed.intermediate_size,
        TOP_K=top_k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.cols,
        SPLIT=tile.split,
        MXFP4=packed.format == "mxfp4",
        X_KIND=_kind(h),
        HAS_BIAS=packed.down_bias is not None,
        ADD=add,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


FEW_PAIRS = 4


def choose_tile(
    format: Literal["dense", "mxfp4"], num_rows: int, num_cols: int, num_pairs: int, top_k: int | None = None
) -> Tile:
    """Tile for `num_pairs` (token, expert) pairs of a matrix [num_rows, num_cols]. `top_k` is for gemv_down, whose
    programs take a token's experts one after another.

    Measured best of six a kernel on one H200 at 1, 2 and 4 tokens (docs/log.md). For MXFP4 `cols` / 8 has to be below
    the number of threads: then the compiler has each thread load the x that it needs, instead of passing x through
    shared memory.
    """
    widest = triton.next_power_of_2(num_cols)
    if top_k is None:
        if format == "mxfp4":
            return Tile(32 if num_pairs <= FEW_PAIRS else 64, min(512, widest), 4)
        return Tile(4, min(1024, widest), 4)
    num_tokens = num_pairs // top_k
    if format == "mxfp4":
        return Tile(32, min(512, widest), 4, 8 if num_tokens == 1 else 4 if num_tokens <= 8 else 1)
    return Tile(8 if num_tokens <= 2 else 4, min(256, widest), 4, max(1, 4 // num_tokens))
