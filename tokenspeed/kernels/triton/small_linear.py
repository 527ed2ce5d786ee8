"""Fused linear for the few rows of a decode step: y = epilogue(norm(x)[M, K] @ W[N, K].T + bias), 1 <= M <= 64.

Formula   acc = sum_k x[m, k] * g[k] * W[n, k];  with a norm g (RMSNorm): acc * rsqrt(mean(x^2) + eps)
          epilogue: silu(first half of rows) * second half (SwiGLU, Shazeer 2020), or + residual
Bytes     N * K * 2 (weights, once) + small. Operations 2 M N K.
          The tensor-core kernel also takes W in e4m3, N * K bytes (`fp8_linear` has its scales and its GEMV).
Bound     on an H200 the weight bytes at 4.26 TB/s up to about M = 150 (808 TFLOP/s bf16).
Measured  one H200, bf16, a graph over distinct weights, Qwen3-8B shapes, M = 1: qkv 3.6, o 3.7, gate/up 4.2, down 4.1,
          head 4.5 TB/s (cuBLAS 3.1, 2.7, 4.1, 3.4, 4.3).

Both kernels use programmatic dependent launch: they start while the kernel before them still runs, load their first
weights (which depend on nobody) and only then wait for their input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.e4m3 import widen_e4m3
from tokenspeed.kernels.triton.gpu import NO_LIMIT, Workspace, copies, fitting, new_workspace
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2
from tokenspeed.kernels.triton.prefetch import prefetch_l2

MAX_ROWS = 64
MAX_SPLIT_K = 4
MAX_SPLIT_TILES = 256
"""Programs of 64 outputs that a split launch has at most: what its workspace is made for."""
HEAD_ROWS = 32768
"""More outputs than any layer has: a vocabulary."""
SCALE_BLOCK = tl.constexpr(128)
"""Rows and columns of e4m3 weights that share a scale, where scales are by block."""


@triton.jit
def load_x(x_ptr, norm_ptr, squares, start, cols, inside, HAS_NORM: tl.constexpr):
    """Columns start + cols of one row of x in float32, times the norm's weights; and the sums of squares it needs."""
    x = tl.load(x_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= tl.load(norm_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def store_row(
    y, up, bias_ptr, residual_ptr, y_ptr, rows, num_out,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Epilogue of outputs [rows] of one row of x; `up`: those of the second half, where GATED."""
    live = rows < num_out
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + num_out + rows, mask=live, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    y_ptr,
    num_out,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. A program owns BLOCK_N outputs (and, gated, the BLOCK_N matching rows of the second half)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < num_out
    cols = tl.arange(0, BLOCK_K)
    w_offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
    up_offsets = w_offsets + num_out.to(tl.int64) * K
    mask = live[:, None] & (cols < K)[None, :]
    w_tile = tl.load(w_ptr + w_offsets, mask=mask, other=0.0)
    up_tile = tl.load(w_ptr + up_offsets, mask=mask, other=0.0) if GATED else w_tile
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + cols < K
        x, squares = load_x(x_ptr, norm_ptr, squares, start, cols, inside, HAS_NORM)
        acc += w_tile.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up_tile.to(tl.float32) * x[None, :]
        following = start + BLOCK_K
        if following < K:
            mask = live[:, None] & (following + cols < K)[None, :]
            w_tile = tl.load(w_ptr + w_offsets + following, mask=mask, other=0.0)
            if GATED:
                up_tile = tl.load(w_ptr + up_offsets + following, mask=mask, other=0.0)
    y = tl.sum(acc, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    up = tl.sum(up_acc, axis=1)
    if HAS_NORM:
        up *= scale
    store_row(y, up, bias_ptr, residual_ptr, y_ptr, rows, num_out, HAS_BIAS, HAS_RESIDUAL, GATED)


@triton.jit
def _store_rows(
    acc, up, scale, bias_ptr, residual_ptr, scale_ptr, y_ptr, rows, tokens, M, num_out,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Epilogue of an accumulator [rows, tokens]."""
    if HAS_NORM:
        acc *= scale[None, :]
        up *= scale[None, :]
    if SCALES == "row":
        acc *= tl.load(scale_ptr + rows, mask=rows < num_out, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scale_ptr + num_out + rows, mask=rows < num_out, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < num_out, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + num_out + rows, mask=rows < num_out, other=0.0).to(tl.float32)[:, None]
        acc = acc * tl.sigmoid(acc) * up
    where = tokens[None, :] * num_out + rows[:, None]
    live = (rows < num_out)[:, None] & (tokens < M)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + where, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + where, acc.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["M"])  # any M up to BLOCK_M runs the same code
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    M,
    num_out,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALES: tl.constexpr,
    CVT: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tensor cores with the weights as the tall operand: acc[BLOCK_N, BLOCK_M] = W tile @ x tile.T.

    SPLIT_K programs share an output tile; each leaves a float32 partial, and the last to arrive adds them up in a
    fixed order, so the result does not depend on which one is last. A norm needs all of K and so SPLIT_K == 1.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    span: tl.constexpr = (K // BLOCK_K + SPLIT_K - 1) // SPLIT_K * BLOCK_K
    first = split * span
    w_row = w_ptr + (rows % num_out).to(tl.int64)[:, None] * K
    up_row = w_row + num_out.to(tl.int64) * K
    x_col = x_ptr + (tokens % M)[None, :] * K
    if PDL:
        if PREFETCH_LINES > 0:
            per_line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
            lines = tl.arange(0, PREFETCH_LINES) * per_line
            prefetch_l2((w_row + first + lines[None, :]).to(tl.int64, bitcast=True))
            if GATED:
                prefetch_l2((up_row + first + lines[None, :]).to(tl.int64, bitcast=True))
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in tl.range(first, min(first + span, K), BLOCK_K, num_stages=STAGES):
        w = tl.load(w_row + start + cols[None, :])
        x = tl.load(x_col + start + cols[:, None])
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            gain = tl.load(norm_ptr + start + cols).to(tl.float32)
            x = (wide * gain[:, None]).to(x.dtype)
        if SCALES == "block":
            # Blocks of SCALE_BLOCK rows and columns; a tile lies in one block.
            scale_row = scale_ptr + tile * BLOCK_N // SCALE_BLOCK * (K // SCALE_BLOCK) + start // SCALE_BLOCK
            acc += tl.dot(widen_e4m3(w, x.dtype, CVT), x) * tl.load(scale_row)
        else:
            acc = tl.dot(widen_e4m3(w, x.dtype, CVT), x, acc)
        if GATED:
            w_up = widen_e4m3(tl.load(up_row + start + cols[None, :]), x.dtype, CVT)
            if SCALES == "block":
                up += tl.dot(w_up, x) * tl.load(scale_row + num_out // SCALE_BLOCK * (K // SCALE_BLOCK))
            else:
                up = tl.dot(w_up, x, up)
    scale = tl.rsqrt(squares / K + eps)
    if SPLIT_K > 1:
        own = partial_ptr + (tile * SPLIT_K + split) * BLOCK_N * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
        tl.store(own + inner, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            tl.store(counter_ptr + tile, 0)
            base = partial_ptr + tile * SPLIT_K * BLOCK_N * BLOCK_M
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for other in range(SPLIT_K):
                total += tl.load(base + other * BLOCK_N * BLOCK_M + inner, cache_modifier=".cg")
            _store_rows(
                total, up, scale, bias_ptr, residual_ptr, scale_ptr, y_ptr, rows, tokens, M, num_out,
                HAS_BIAS, HAS_NORM, HAS_RESIDUAL, GATED, SCALES,
            )  # fmt: skip
    else:
        _store_rows(
            acc, up, scale, bias_ptr, residual_ptr, scale_ptr, y_ptr, rows, tokens, M, num_out,
            HAS_BIAS, HAS_NORM, HAS_RESIDUAL, GATED, SCALES,
        )  # fmt: skip


_gemv, _skinny = QuickLaunch(_gemv_kernel), QuickLaunch(_skinny_kernel)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Rows and columns of a program's step, and warps."""

    block_n: int = 4
    block_k: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Weight rows and columns of a tile, programs that share an output tile, pipeline stages, warps, and 128-byte lines
    of each weight row that a program brings into L2 while the kernel before it still runs."""

    block_n: int = 64
    block_k: int = 128
    split_k: int = 1
    stages: int = 4
    num_warps: int = 4
    prefetch_lines: int = 0


def output_of(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Where the result goes: the residual itself, or a new [M, N], gated [M, N / 2]."""
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1)) if residual is None else residual


def options(
    bias: torch.Tensor | None, norm: torch.Tensor | None, residual: torch.Tensor | None, gated: bool, num_warps: int,
    pdl: bool,
) -> dict[str, bool | int]:  # fmt: skip
    """What all kernels of linears are launched with."""
    return {
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "PDL": pdl,
        "num_warps": num_warps,
        "launch_pdl": pdl,
    }


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    tile: GemvTile | SkinnyTile | None = None,
    pdl: bool = True,
    limit: int = NO_LIMIT,
) -> torch.Tensor:
    """x [M, K] contiguous, weight [N, K], M <= 64, K a multiple of 128 when M > 1.

    Args:
        norm: [K] weight of an RMSNorm applied to x first, with `eps`.
        residual: [M, N], updated in place with the sum and returned.
        gated: W's rows are [gate | up]; the result is silu(gate) * up.
        tile: None = chosen by shape.
        limit: shared memory that one program may have, for the choice.
    Returns:
        [M, N], [M, N / 2] when gated; `residual` itself when given.
    """
    num_rows, width = x.shape
    out = output_of(x, weight, residual, gated)
    num_out = out.shape[1]
    if tile is None:
        tile = choose_tile(num_rows, num_out, width, norm is not None or gated)
        if isinstance(tile, SkinnyTile):
            tile = fitting_tile(tile, num_rows, gated, weight.element_size(), limit)
    if isinstance(tile, SkinnyTile):
        skinny_linear(x, weight, None, "none", workspace, bias, norm, eps, residual, gated, tile, out, pdl)
        return out
    _gemv[(ceil_div(num_out, tile.block_n),)](
        x,
        weight,
        bias,
        norm,
        residual,
        out,
        num_out,
        eps,
        K=width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        **options(bias, norm, residual, gated, tile.num_warps, pdl),
    )
    return out


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    scales: Literal["none", "row", "block"],
    workspace: Workspace,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    tile: SkinnyTile,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """The tensor-core kernel, result in `out`; see `fused_linear`. `scale` goes with an e4m3 weight: float32, [N] by
    row, [ceil(N / 128), K / 128] by block, and then a tile lies in one block."""
    num_rows, width = x.shape
    num_out = out.shape[1]
    _skinny[(ceil_div(num_out, tile.block_n), tile.split_k)](
        x,
        weight,
        bias,
        norm,
        residual,
        scale,
        out,
        workspace.partials,
        workspace.counters,
        num_rows,
        num_out,
        eps,
        K=width,
        BLOCK_M=block_m(num_rows),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k,
        STAGES=tile.stages,
        SCALES=scales,
        CVT=scales != "none" and x.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret,
        PREFETCH_LINES=tile.prefetch_lines,
        **options(bias, norm, residual, gated, tile.num_warps, pdl),
    )


def choose_tile(
    num_rows: int, num_out: int, width: int, needs_whole_k: bool, weight_bytes: int = 2
) -> GemvTile | SkinnyTile:
    """Tiles measured best on one H200 in chains of layers of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-20b (docs/log.md), by
    what made them best: one row wants long contiguous reads; several rows want about 256 programs (128 from 33 rows
    on), by splitting K where N is short. `weight_bytes`: of an element; what was measured with 2 may not hold for 1."""
    in_second_tile = 16 < num_rows <= 32 and weight_bytes == 2
    if num_rows == 1:
        return _gemv_tile(num_out, width)
    if width % 128:
        blocks, most = width // 64, max(1, MAX_SPLIT_TILES // ceil_div(num_out, 64))
        split_k = 1 if needs_whole_k else max(split for split in (1, 2, 3, 4) if split <= most and blocks % split == 0)
        return SkinnyTile(block_k=64, split_k=split_k, stages=4 if split_k > 1 else 6)
    if needs_whole_k:
        if num_rows <= 16 and num_out >= 8192:
            return SkinnyTile(128, 128, 1, 3, 8)
        if in_second_tile:
            return SkinnyTile(64, 64, 1, 5)
        return SkinnyTile(64, 128, 1, 4, 4, 4) if num_rows <= 32 else SkinnyTile(128, 64)
    if in_second_tile and width >= LONG_WIDTH >= num_out:
        return SkinnyTile(split_k=2, stages=6)  # a program an SM, and steps far ahead
    programs = 256 if num_rows <= 32 else 128
    split_k = max(1, min(MAX_SPLIT_K, programs * 64 // num_out))
    split_k = 1 << (split_k.bit_length() - 1)
    if num_rows <= 32 and 128 < ceil_div(num_out, 64) * split_k < 256:
        return SkinnyTile(block_k=64, split_k=split_k, stages=6)  # more, smaller steps even out a part-filled card
    return SkinnyTile(split_k=split_k)


def fitting_tile(tile: SkinnyTile, num_rows: int, gated: bool, weight_bytes: int, limit: int) -> SkinnyTile:
    """`tile`; where a program may have less shared memory than on the GPU that it was measured on (`limit` bytes), one
    of fewer stages, or of fewer outputs."""
    columns = block_m(num_rows) * 2

    def needed(a: SkinnyTile) -> int:
        rows = a.block_n * weight_bytes * (2 if gated else 1)
        return copies(a.stages, limit) * a.block_k * (rows + columns)

    return fitting(_lighter_tiles(tile), needed, limit)


def _lighter_tiles(tile: SkinnyTile) -> Iterator[SkinnyTile]:
    """A loop of three stages or more reads ahead. Outputs of a split tile are counted (`make_workspace`) and stay."""
    yield tile  # before a copy is made: a launch that no graph holds comes here, and this one it mostly is
    while True:
        for stages in range(tile.stages, min(2, tile.stages - 1), -1):
            yield replace(tile, stages=stages)
        if tile.block_n <= 32 or tile.split_k > 1:
            break
        tile = replace(tile, block_n=tile.block_n // 2, num_warps=4)
    yield replace(tile, stages=2)


def block_m(num_rows: int) -> int:
    """Rows of x that a program's tensor cores take."""
    return max(16, power_of_2(num_rows))


LONG_WIDTH = 8192
"""Columns, as the projection down from a dense layer's inner size has them; its outputs are fewer."""
LARGE_WEIGHT = 2 * 10**8
"""Elements: more than a layer of a model of 8 billion parameters has in one weight, fewer than its head."""
FULL_TILES = (16, 32)


def is_for_cublas(num_rows: int, num_out: int, width: int) -> bool:
    """Whether cuBLAS is quicker for a plain linear of up to 64 rows: for a large weight and several rows, unless the
    rows fill tiles of 16 or 32 of which no row is idle, at widths of whole steps of 128.

    One H200, us by the tensor-core kernel / cuBLAS. 151,936 outputs of 4096: 8 rows 314 / 289, 16: 285 / 293, 24: 319 /
    295, 32: 291 / 297, 40: 343 / 297, 64: 330 / 303. 201,088 outputs of 2880: 4 rows 293 / 268, 8: 293 / 270, 16: 297 /
    274, 24: 298 / 274, 32: 293 / 278, 64: 286 / 297. One row, where the GEMV is the other: 277 / 289 and 255 / 274.
    """
    is_full = num_rows in FULL_TILES and width % 128 == 0
    return num_rows > 1 and num_out * width >= LARGE_WEIGHT and not is_full


def _gemv_tile(num_out: int, width: int) -> GemvTile:
    if num_out > HEAD_ROWS:
        return GemvTile(4, 1024, 4) if width % 1024 == 0 else GemvTile(2, 2048, 4)
    if num_out > 4096:
        return GemvTile(8, 512, 4) if width < 4096 else GemvTile(4, 1024, 4)
    if width > 4096:
        return GemvTile(2, 2048, 4)
    if num_out < 4096:
        return GemvTile(8 if num_out > 2048 else 4, 1024, 8)
    return GemvTile(2, 2048, 8)


def make_workspace(device: torch.device) -> Workspace:
    """Enough for every tile of `choose_tile`."""
    return new_workspace(device, MAX_SPLIT_TILES * 64 * MAX_ROWS, MAX_SPLIT_TILES)
