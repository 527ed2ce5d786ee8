"""Dense experts for the few tokens of a decode step, without tensor cores: two launches, each chosen expert read once.

Formula   h[t, k] = activation(W_gate_up[e] x[t] + b), out[t] = sum over k of weight[t, k] (W_down[e] h[t, k] + b)
          with e = expert_ids[t, k], read on the device
Bytes     tokens * top_k * 3 * I * H * 2 for bf16; tokens that share an expert read it from L2.
Bound     the weight bytes at 4.26 TB/s on an H200.

Both launches use programmatic dependent launch. The first waits before it reads anything, because the experts come from
the launch before it; the second may read expert_ids at once, because it starts only after the first has waited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.gpu import Workspace, new_workspace
from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.moe.interface import Activation


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """One layer's experts: gate_up [E, 2I, H], down [E, H, I] in the model's dtype, contiguous; biases [E, 2I] and
    [E, H] or None. Rows of gate_up are interleaved: see `moe.interface.ExpertWeights`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.gate_up.shape[1] // 2


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows and columns of a program's step, warps, programs that share an output (`split`, gemv_down only)."""

    rows: int
    cols: int
    num_warps: int
    split: int = 1


def make_workspace(device: torch.device) -> Workspace:
    """Of `gemv_down`."""
    return new_workspace(device, 1 << 20, 4096)


@triton.jit
def _load_tile(w_ptr, expert, rows, start, live, NUM_ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights [N, BLOCK_K] of an expert's rows from column `start`. Outside the matrix, or when not `live`, nothing is
    read."""
    inside = rows < tl.where(live, NUM_ROWS, 0)
    cols = start + tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (cols < K)[None, :]
    return tl.load(w_ptr + expert * (NUM_ROWS * K) + (rows * K)[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _rows_of_experts(
    x_ptr, w_ptr, ids_ptr, weights_ptr, rows, first, last,
    NUM_ROWS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum over steps first..last of W[rows, step's columns] @ x, float32 [BLOCK_N]. Step s is columns (s % steps) *
    BLOCK_K of the expert ids[s // steps] and row s // steps of x, times that expert's weight where WEIGHTED."""
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    expert = tl.load(ids_ptr + first // steps).to(tl.int64)
    w = _load_tile(w_ptr, expert, rows, first % steps * BLOCK_K, first < last, NUM_ROWS, K, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in range(first, last):
        following = step + 1
        more = following < last
        if WEIGHTED:
            expert = tl.load(ids_ptr + following // steps, mask=more, other=0).to(tl.int64)
        next_w = _load_tile(w_ptr, expert, rows, following % steps * BLOCK_K, more, NUM_ROWS, K, BLOCK_K)
        slot = step // steps
        cols = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + slot * K + cols, mask=cols < K, other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + slot)
        acc += w.to(tl.float32) * x
        w = next_w
    return tl.sum(acc, axis=1)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
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
    y = _rows_of_experts(
        x_ptr + pair // TOP_K * K, w_ptr, ids_ptr + pair, ids_ptr, rows, 0, steps,
        NUM_ROWS, K, BLOCK_N, BLOCK_K, False, False,
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


@triton.jit
def _down_kernel(
    h_ptr,
    w_ptr,
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
    y = _rows_of_experts(
        h_ptr + token * TOP_K * K, w_ptr, ids_ptr, weights_ptr, rows, first, last,
        NUM_ROWS, K, BLOCK_N, BLOCK_K, True, PDL,
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


def gemv_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: DenseExperts,
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
    num_rows = experts.gate_up.shape[1]
    if out is None:
        out = x.new_empty(expert_ids.numel(), num_rows // 2, dtype=torch.float32)
    if tile is None:
        tile = choose_tile(experts.hidden_size)
    _gate_up_kernel[(expert_ids.numel(), ceil_div(num_rows, tile.rows))](
        x,
        experts.gate_up,
        experts.gate_up_bias,
        expert_ids,
        out,
        activation.limit or 0.0,
        activation.alpha,
        NUM_ROWS=num_rows,
        K=experts.hidden_size,
        TOP_K=top_k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.cols,
        HAS_BIAS=experts.gate_up_bias is not None,
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
    experts: DenseExperts,
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
    num_rows = experts.hidden_size
    if tile is None:
        tile = choose_tile(experts.intermediate_size, num_tokens)
    groups = num_tokens * ceil_div(num_rows, tile.rows)
    if tile.split > 1:
        have = min(workspace.counters.numel(), workspace.partials.numel() // (tile.split * tile.rows))
        if groups > have:
            raise ValueError(f"{groups} output tiles, each of {tile.split} programs; the workspace has room for {have}")
    _down_kernel[(num_tokens, ceil_div(num_rows, tile.rows), tile.split)](
        h,
        experts.down,
        experts.down_bias,
        expert_ids,
        weights,
        out,
        workspace.partials,
        workspace.counters,
        NUM_ROWS=num_rows,
        K=experts.intermediate_size,
        TOP_K=top_k,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.cols,
        SPLIT=tile.split,
        HAS_BIAS=experts.down_bias is not None,
        ADD=add,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


def choose_tile(num_cols: int, num_tokens: int | None = None) -> Tile:
    """Tile for a matrix of `num_cols` columns; `num_tokens` is for gemv_down, whose programs take a token's experts one
    after another.

    Measured best of six a kernel on one H200 at 1, 2 and 4 tokens (docs/log.md).
    """
    widest = power_of_2(num_cols)
    if num_tokens is None:
        return Tile(4, min(1024, widest), 4)
    return Tile(8 if num_tokens <= 2 else 4, min(256, widest), 4, max(1, 4 // num_tokens))
