"""MXFP4 experts on Hopper's float16 tensor cores, for prompts: each weight is widened in a register, by every program.

Formula   that of `moe_grouped`; W[n, k] = code * 2^(scale - 127) = w[n, k] * 2^(reference[n] - 112), w in float16:
          scales are taken relative to their row's largest, so that nothing is left to be scaled inside the sum
Bytes     17 / 32 a value, and x and h in float16. Operations 6 T k H I.
Bound     808 TFLOP/s, of which an H200 gave 544, and the instructions around the products: of a thread, for each of
          its weights and each tile of pairs, 3.1 with 4 warps and 5.2 with 8 (Triton 3.6, ptxas 12.8). Yet that is
          less than `moe_mxfp4_mma` takes for many pairs, which scales every result of every 32 columns.
          gpt-oss-20b's layer on an H200 in us, without and with these kernels: 64 tokens 131 and 154, 256 251 and 226,
          1024 696 and 502, 2048 1226 and 857, 8000 3110 and 3008 (docs/log.md)

Numbers   w is exact: `moe_mxfp4.references` serves rows whose scales lie within 29 binades, others have none. y = x /
          inverse, inverse a power of two that brings the row's largest to [2^14, 2^15): exact for a bfloat16 down to
          2^-31 of the row's largest. h is written times a power of two below 65504 / (L (L + 1)) for the activation's
          limit L, 1024 for GPT-OSS; without a limit these kernels are not used (`why_no_fp16`). Sums are float32. NaN
          stays NaN; an infinite x becomes NaN.
Errors    of float32's result at GPT-OSS' sizes on an H200, norm by norm, the layer in bfloat16: 2.4e-3

Columns   16 h + 4 t + 2 a + b of x and of h lie at 16 h + 8 a + 2 t + b: see `moe_mxfp4_fp16_gluon`.

Launches, all with programmatic dependent launch: pairs grouped; x scaled; gate and up; down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.kernels.triton.moe_align import Grouping
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, product_constants, warm_up_matrix
from tokenspeed.kernels.triton.moe_mxfp4_mma import NO_GLUON, hidden_scale
from tokenspeed.moe.interface import Activation, MoeNeed

if NO_GLUON is None:
    from tokenspeed.kernels.triton.moe_mxfp4_fp16_gluon import fp16_kernel
else:
    fp16_kernel = None

MAX_HALF = 65504
"""Of float16."""


@dataclass(frozen=True, slots=True)
class Fp16Tile:
    """Weight rows of a program, pipeline stages of 64 columns, warps, tiles of pairs that share weights in L2; `ahead`:
    the next weights are unpacked while a product runs; `smallest`: pairs down to which a tile is halved for few; and
    the most registers of a thread, so that two programs fit on an SM."""

    block_n: int = 128
    stages: int = 5
    num_warps: int = 8
    group_m: int = 4
    ahead: bool = True
    smallest: int = 32
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class HalfRows:
    """Rows [R, K] float16, their columns renamed, times `inverse` [R] float32."""

    values: torch.Tensor
    inverse: torch.Tensor

    def joined(self) -> torch.Tensor:
        """The rows in float32, columns in their order (benchmarks and tests)."""
        return in_order(self.values).float() * self.inverse[:, None]


def in_order(values: torch.Tensor) -> torch.Tensor:
    """[R, K] with its columns renamed -> as they were."""
    num_rows, width = values.shape
    return values.view(num_rows, width // 16, 2, 4, 2).transpose(2, 3).reshape(num_rows, width)


def why_no_fp16(activation: Activation, *matrices: ExpertMatrix) -> str | None:
    """None where these kernels serve MXFP4 experts that `moe_mxfp4_mma` does, otherwise the reason."""
    if hidden_scale(activation) == 0:
        return "the activation has no limit, or a high one, and values between the matrices might not fit float16"
    if any(matrix.reference is None for matrix in matrices):
        return "a row's MXFP4 scales are further apart than float16 is wide"
    return None


def half_scale(activation: Activation) -> float:
    """What h is multiplied by before it becomes float16: a power of two."""
    limit = activation.limit
    assert limit, "`why_no_fp16` has a reason"
    return 2.0 ** math.floor(math.log2(MAX_HALF / (limit * (limit + 1))))


@triton.jit
def _scale_kernel(x_ptr, y_ptr, inverse_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 15)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    y = tl.where(tl.abs(x) == float("inf"), float("nan"), x * scale).to(tl.float16)
    y = tl.reshape(tl.permute(tl.reshape(y, (BLOCK // 16, 4, 2, 2)), (0, 2, 1, 3)), (BLOCK,))
    tl.store(y_ptr + row * K + cols, y, mask=cols < K)
    tl.store(inverse_ptr + row, inverse)


def half_rows(x: torch.Tensor, pdl: bool = True) -> HalfRows:
    """x [R, K] contiguous, any float dtype; 16 divides K."""
    num_rows, width = x.shape
    values = torch.empty_like(x, dtype=torch.float16)
    inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _scale_kernel[(num_rows,)](
        x, values, inverse, K=width, BLOCK=power_of_2(width), PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return HalfRows(values, inverse)


def fp16_gate_up(
    rows: HalfRows, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation, tile: Fp16Tile
) -> torch.Tensor:
    """rows of x [T, H] -> h [T * top_k, I] float16 times `half_scale`, in the order of `grouping.pairs`, its columns
    renamed."""
    shape = grouping.pairs.shape[0], matrix.num_rows // 2
    h = torch.empty(shape, dtype=torch.float16, device=rows.values.device)
    _launch(rows.values, rows.inverse, matrix, grouping, top_k, activation, True, None, h, tile)
    return h


def fp16_down(
    h: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, weights: torch.Tensor, activation: Activation,
    dtype: torch.dtype, tile: Fp16Tile,
) -> torch.Tensor:  # fmt: skip
    """h of `fp16_gate_up`, weights [T, k] float32 -> parts [1, T * k, H] in `dtype`, by pair, weighted."""
    parts = torch.empty(1, grouping.pairs.shape[0], matrix.num_rows, dtype=dtype, device=h.device)
    _launch(h, None, matrix, grouping, weights.shape[1], activation, False, weights, parts, tile)
    return parts


def _launch(
    x: torch.Tensor, inverse: torch.Tensor | None, matrix: ExpertMatrix, grouping: Grouping, top_k: int,
    activation: Activation, is_up: bool, weights: torch.Tensor | None, out: torch.Tensor, tile: Fp16Tile,
) -> None:  # fmt: skip
    assert fp16_kernel is not None and matrix.reference is not None, "`why_no_fp16` has a reason"
    programs = grouping.max_tiles * ceil_div(matrix.num_rows, tile.block_n)
    fp16_kernel[(programs,)](
        x, inverse, matrix.weight, matrix.scale, matrix.reference, matrix.bias, grouping.pairs, grouping.tiles,
        weights, out, grouping.max_tiles,
        **fp16_constants(matrix, grouping.block_m, top_k, activation, is_up, tile),
        num_warps=tile.num_warps, maxnreg=tile.max_registers, launch_pdl=True,
    )  # fmt: skip


def fp16_constants(
    matrix: ExpertMatrix, block_m: int, top_k: int, activation: Activation, is_up: bool, tile: Fp16Tile
) -> dict[str, object]:
    """The kernel's constants."""
    return {
        **product_constants(matrix, block_m, top_k, activation, is_up, tile.group_m),
        "SMALLEST": tile.smallest,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "H_SCALE": half_scale(activation),
        "AHEAD": tile.ahead,
        "WARPS": tile.num_warps,
    }


def warm_up_fp16(need: MoeNeed, block_m: int, tile: Fp16Tile, is_up: bool, parts_dtype: torch.dtype) -> None:
    """Compile what `fp16_gate_up` or `fp16_down` would launch on this GPU, without launching it."""
    assert fp16_kernel is not None, "`why_no_mma` has a reason"
    fp16_kernel.warmup(
        torch.float16, torch.float32 if is_up else None, torch.uint8, torch.int32, torch.int32,
        need.dtype if need.has_bias else None, torch.int32, torch.int32, None if is_up else torch.float32,
        torch.float16 if is_up else parts_dtype, 64, grid=(1,),
        **fp16_constants(warm_up_matrix(need, is_up), block_m, need.top_k, need.activation, is_up, tile),
        num_warps=tile.num_warps, maxnreg=tile.max_registers, launch_pdl=True,
    )  # fmt: skip
