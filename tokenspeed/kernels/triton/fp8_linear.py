"""Linear over weights in e4m3 (1 byte): kept so in memory, widened in registers for few rows, fp8 matmul for many.

Formula   y[m, n] = sum_k x[m, k] * W[n, k] * s, s = scale[n] (row) or scale[n // 128, k // 128] (block)
          one row, and up to 64 with block scales: with the epilogues of `small_linear`: norm before, gate, residual
          more rows, row scales: x in e4m3 with one scale a token, absmax / 448, and the card's fp8 matmul;
          more, block scales: W widened to bfloat16 (5 bytes an element more), and the bfloat16 matmul
Bytes     N * K (weights, once) + small; row scales 4 N. Operations 2 M N K.
Bound     on an H200 the weight bytes at 4.26 TB/s while few rows; 1456 TFLOP/s fp8 for many.
          One row has 7.4 instructions a weight at that rate (132 multiprocessors, 128 lanes, 1.75 GHz): a weight takes
          half a conversion to float16, one to float32 and one multiply-add.

With row scales, x of several rows is rounded to e4m3 (relative error 2^-4 an element, about 2.6 % of a sum's norm); a
single row is not.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.triton import small_linear
from tokenspeed.kernels.triton.gpu import NO_LIMIT, Workspace, has_pdl, shared_bytes, why_no_e4m3, why_no_triton
from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.kernels.triton.pointwise import rms_norm, silu_and_mul
from tokenspeed.kernels.triton.small_linear import (
    MAX_ROWS,
    SCALE_BLOCK,
    GemvTile,
    SkinnyTile,
    fitting_tile,
    load_x,
    make_workspace,
    options,
    output_of,
    skinny_linear,
    store_row,
)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = tl.constexpr(448.0)
BLOCK = 128


@triton.jit
def _widen(words, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CVT: tl.constexpr):
    """e4m3 weights, four in an int32 [BLOCK_N, BLOCK_K / 4] -> float32 [BLOCK_N, BLOCK_K].

    By hand because the compiler takes words apart byte by byte and puts them together again: 5.5 instructions a weight
    in all, and 3.3 so. CVT: the GPU's conversion (compute capability 8.9); otherwise by bits, for the interpreter.
    """
    if CVT:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }
            """,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        first = _from_top_byte(words << 24)
        second = _from_top_byte(words << 16)
        third = _from_top_byte(words << 8)
        fourth = _from_top_byte(words)
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (BLOCK_N, BLOCK_K))


@triton.jit
def _from_top_byte(words):
    """The e4m3 in the top byte of an int32, as float32: its exponent is biased by 7, float32's by 127."""
    return ((words >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _sum_16(
    words, x, scale_ptr, first_row, start,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALES: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """Products of a tile and x [BLOCK_K], added up 16 by 16 (one thread's load): [BLOCK_N, BLOCK_K / 16].

    Block scales: the tile's rows lie in one block, and so does each run of 16 columns.
    """
    runs: tl.constexpr = BLOCK_K // 16
    sums = tl.sum(tl.reshape(_widen(words, BLOCK_N, BLOCK_K, CVT) * x[None, :], (BLOCK_N, runs, 16)), axis=2)
    if SCALES == "block":
        run_starts = start + tl.arange(0, runs) * 16
        scale_row = scale_ptr + first_row // SCALE_BLOCK * (K // SCALE_BLOCK)
        sums *= tl.load(scale_row + run_starts // SCALE_BLOCK, mask=run_starts < K, other=0.0)[None, :]
    return sums


@triton.jit
def _fp8_gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    scale_ptr,
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
    SCALES: tl.constexpr,
    CVT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. As `small_linear._gemv_kernel`, with weights as int32 words of four (w_ptr)."""
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    live = rows < num_out
    cols = tl.arange(0, BLOCK_K)
    words = tl.arange(0, BLOCK_K // 4)
    w_offsets = rows.to(tl.int64)[:, None] * (K // 4) + words[None, :]
    up_offsets = w_offsets + num_out.to(tl.int64) * (K // 4)
    mask = live[:, None] & (words < K // 4)[None, :]
    w_tile = tl.load(w_ptr + w_offsets, mask=mask, other=0)
    up_tile = tl.load(w_ptr + up_offsets, mask=mask, other=0) if GATED else w_tile
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_K // 16), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K // 16), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + cols < K
        x, squares = load_x(x_ptr, norm_ptr, squares, start, cols, inside, HAS_NORM)
        acc += _sum_16(w_tile, x, scale_ptr, first, start, K, BLOCK_N, BLOCK_K, SCALES, CVT)
        if GATED:
            up_acc += _sum_16(up_tile, x, scale_ptr, num_out + first, start, K, BLOCK_N, BLOCK_K, SCALES, CVT)
        following = (start + BLOCK_K) // 4
        if following < K // 4:
            mask = live[:, None] & (following + words < K // 4)[None, :]
            w_tile = tl.load(w_ptr + w_offsets + following, mask=mask, other=0)
            if GATED:
                up_tile = tl.load(w_ptr + up_offsets + following, mask=mask, other=0)
    y = tl.sum(acc, axis=1)
    up = tl.sum(up_acc, axis=1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= factor
        up *= factor
    if SCALES == "row":
        y *= tl.load(scale_ptr + rows, mask=live, other=0.0)
        if GATED:
            up *= tl.load(scale_ptr + num_out + rows, mask=live, other=0.0)
    store_row(y, up, bias_ptr, residual_ptr, y_ptr, rows, num_out, HAS_BIAS, HAS_RESIDUAL, GATED)


@triton.jit
def _quantize_rows_kernel(x_ptr, q_ptr, scale_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row of x a program, held in registers: read once."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * K + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / E4M3_MAX, 1e-12)
    scaled = tl.clamp(x / scale, -E4M3_MAX, E4M3_MAX)
    tl.store(q_ptr + row * K + cols, scaled.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: torch.Tensor, pdl: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] contiguous -> e4m3 [T, K] and float32 [T, 1], absmax / 448 of each row. x is about e4m3 * scale."""
    num_rows, width = x.shape
    q = torch.empty(num_rows, width, dtype=E4M3, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = power_of_2(width)
    _quantize_rows_kernel[(num_rows,)](
        x, q, scale, K=width, BLOCK=block, PDL=pdl, num_warps=min(16, max(1, block // 1024)), launch_pdl=pdl
    )
    return q, scale


@triton.jit
def _dequantize_blocks_kernel(
    w_ptr, scale_ptr, y_ptr, num_out, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A tile [BLOCK_N, BLOCK_K] inside one block of scales."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    where = rows.to(tl.int64)[:, None] * K + cols[None, :]
    live = (rows < num_out)[:, None] & (cols < K)[None, :]
    scale_row = scale_ptr + tl.program_id(0) * BLOCK_N // SCALE_BLOCK * (K // SCALE_BLOCK)
    scale = tl.load(scale_row + tl.program_id(1) * BLOCK_K // SCALE_BLOCK)
    w = tl.load(w_ptr + where, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + where, (w * scale).to(y_ptr.dtype.element_ty), mask=live)


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight e4m3 [N, K], K a multiple of 128, scale [ceil(N / 128), K / 128] float32 -> [N, K] in `dtype`."""
    num_out, width = weight.shape
    out = torch.empty(num_out, width, dtype=dtype, device=weight.device)
    grid = (ceil_div(num_out, 32), width // BLOCK)
    _dequantize_blocks_kernel[grid](weight, scale, out, num_out, K=width, BLOCK_N=32, BLOCK_K=BLOCK, num_warps=4)
    return out


def fused_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
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
    """`small_linear.fused_linear` with weight e4m3 [N, K], K a multiple of 64, and scale float32: [N], or
    [ceil(N / 128), K / 128] (gated: N / 2 a multiple of 128).

    Args:
        limit: shared memory that one program may have, for the choice of a tile.
    Returns:
        [M, N], [M, N / 2] when gated; `residual` itself when given.
    """
    num_rows, width = x.shape
    out = output_of(x, weight, residual, gated)
    num_out = out.shape[1]
    if tile is None:
        tile = choose_tile(num_rows, num_out, width, norm is not None or gated)
        if isinstance(tile, SkinnyTile):
            tile = fitting_tile(tile, num_rows, gated, 1, limit)
    if isinstance(tile, SkinnyTile):
        scales: Literal["row", "block"] = "row" if scale.dim() == 1 else "block"
        skinny_linear(x, weight, scale, scales, workspace, bias, norm, eps, residual, gated, tile, out, pdl)
        return out
    _fp8_gemv_kernel[(ceil_div(num_out, tile.block_n),)](
        x,
        weight.view(torch.int32),
        bias,
        norm,
        residual,
        scale,
        out,
        num_out,
        eps,
        K=width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SCALES="row" if scale.dim() == 1 else "block",
        CVT=not triton.knobs.runtime.interpret,
        **options(bias, norm, residual, gated, tile.num_warps, pdl),
    )
    return out


def choose_tile(num_rows: int, num_out: int, width: int, needs_whole_k: bool) -> GemvTile | SkinnyTile:
    """`small_linear`'s, but for one row: a row has half of the bytes, so a tile has more rows or columns."""
    if num_rows == 1:
        if num_out > 4096:
            return GemvTile(8, 1024, 4)
        return GemvTile(8, 2048, 8) if width > 4096 else GemvTile(4, 2048, 4)
    return small_linear.choose_tile(num_rows, num_out, width, needs_whole_k, weight_bytes=1)


class TritonFp8Linear:
    """`kernels.ops.Fp8Linear` on NVIDIA GPUs from compute capability 8.9 on."""

    max_fused_rows = MAX_ROWS

    def __init__(self, device: torch.device, pdl: bool) -> None:
        self._workspace = make_workspace(device)
        self._pdl = pdl
        self._limit = shared_bytes(device)

    def why_not(self, in_features: int, out_features: int, is_block: bool) -> str | None:
        """See `Fp8Linear.why_not`."""
        if is_block and in_features % BLOCK:
            return f"rows of {in_features} are not a multiple of the block of {BLOCK}"
        if in_features % 64:
            return f"rows of {in_features} are not a multiple of 64"
        if out_features % 16:
            return f"{out_features} rows are not a multiple of 16"
        return None

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """See `Fp8Linear.__call__`."""
        is_block = scale.dim() == 2
        if x.shape[0] == 1 or (is_block and x.shape[0] <= MAX_ROWS):
            return fused_fp8_linear(
                x, weight, scale, self._workspace, bias, norm, eps, residual, gated, pdl=self._pdl, limit=self._limit
            )
        if norm is not None:
            x = rms_norm(x, norm, eps, pdl=self._pdl)
        if is_block:
            y = functional.linear(x, dequantize_blocks(weight, scale, x.dtype), bias)
        else:
            y = self._both_fp8(x, weight, scale)
            y = y if bias is None else y + bias
        if gated:
            y = silu_and_mul(y, pdl=self._pdl)
        return y if residual is None else residual.add_(y)

    def _both_fp8(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Activations in e4m3 too, by token. From two rows on: widening weights for the tensor cores costs more than
        reading them (16 rows of Qwen3-8B on an H200: 8.0 ms a step, 4.8 with bfloat16 weights)."""
        q, row_scale = quantize_rows(x.contiguous(), self._pdl)
        return torch._scaled_mm(
            q, weight.t(), scale_a=row_scale, scale_b=scale[None], out_dtype=x.dtype, use_fast_accum=True
        )


def _why_not(need: Need) -> str | None:
    reason = why_no_triton(need)
    if reason is not None:
        return reason
    if need.dtype != torch.bfloat16:
        return f"the fp8 matmul gives bfloat16, the dtype is {str(need.dtype).removeprefix('torch.')}"
    return why_no_e4m3(need.device)


def _make(need: Need) -> TritonFp8Linear:
    return TritonFp8Linear(need.device, pdl=has_pdl(need.device))


IMPLEMENTATIONS = (Implementation(op="fp8_linear", name="triton", rank=50, why_not=_why_not, make=_make),)
