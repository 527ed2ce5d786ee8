"""MXFP4 experts on Hopper's FP8 tensor cores, for all but the largest prompts; `moe_grouped` is for everything else.

Formula   that of `moe_grouped`; x and h come as two e4m3 and e5m2 parts, code products are exact, and a block of 32
          columns is multiplied by its scale after the product: acc += 2^(scale - 127) (W_codes x_low + W_codes x_high)
Bytes     few tokens: each distinct expert's matrices once, 17 / 32 a value. Operations 12 T k H I in e4m3.
Bound     on an H200 4.26 TB/s for few tokens; for many the instructions around the products: a multiply-add brings
          in each block's scale for every result. Counted in the inner loop (Triton 3.6, ptxas 12.8), of a thread, for
          each of its weights: 8 pairs by 64 rows, unrolled, 2.0 to 2.2, by 128 rows 1.9, as a loop 3.1; 16 pairs 2.5,
          32 pairs 3.0, 64 pairs 4.3 and 5.2. Widening to bfloat16 in registers took 3.1 for 16 pairs.

Numbers   x[t] = (high + low) * inverse[t], inverse a power of two that brings the row's largest to [128, 256); high =
          e4m3(y), low = e5m2(y - high): together all bits of a bfloat16 down to 2^-13 of the row's largest, below that
          wrong by at most 2^-20 of it. h is clamped by the activation's limit L, so that its scale is known before:
          the power of two below 448 / (L (L + 1)), 8 for GPT-OSS; gate and up write both parts. No row of h can make it
          larger: below 2^-6 over the scale, 2^-9, the error of h is absolute, at most 2^-17. Of a row's norm, with
          normal gates, 1.3e-3 at a deviation of 1 to 0.01, 6.7e-3 at 1e-3, 5e-2 at 1e-4. Without a limit, or with one
          above 20, h is written in bfloat16 and split by row like x. NaN stays NaN; an infinite x becomes NaN. A sum
          overflows where 2^8 times it over the row's largest would: earlier than in float32, far beyond any model's
          numbers.
Errors    of float32's result at GPT-OSS' sizes on an H200, norm by norm: h 1.3e-3, the layer in bfloat16 2.1e-3, which
          is 1.7e-3 to 2.9e-3 by way of bfloat16.

Three launches, all with programmatic dependent launch: pairs grouped beside x split; gate and up; down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.kernels.triton.moe_align import (
    MAX_SMALL_PAIRS,
    SMALL_SHARE,
    SMALL_STEP,
    Grouping,
    align_share,
    empty_grouping,
    expert_block,
    group_pairs,
    num_shares,
)
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, product_constants, warm_up_matrix
from tokenspeed.kernels.triton.moe_mxfp4 import low_bits
from tokenspeed.moe.interface import Activation, MoeNeed

try:
    from tokenspeed.kernels.triton.moe_mxfp4_gluon import product_kernel
except (ImportError, AttributeError) as error:
    product_kernel = None
    NO_GLUON: str | None = f"Triton {triton.__version__} has another Gluon ({error})"
else:
    NO_GLUON = None

HIGH, LOW = torch.float8_e4m3fn, torch.float8_e5m2
MAX_HIGH = 448
"""Of e4m3."""


@dataclass(frozen=True, slots=True)
class MmaTile:
    """Weight rows of a program, 128 columns `chunks` times a step, pipeline stages, warps; `unroll`: the loop's body
    once for each stage; `at_once`: blocks of 32 columns multiplied before the first is waited for (4, 2, 1); programs
    that share an output (down only); tiles of pairs that share weights in L2."""

    block_n: int = 64
    chunks: int = 1
    stages: int = 4
    num_warps: int = 4
    unroll: bool = False
    at_once: int = 4
    split_k: int = 1
    group_m: int = 1


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows [R, K] as high e4m3 + low e5m2, times `inverse` [R] float32; None: times a number that is known."""

    high: torch.Tensor
    low: torch.Tensor
    inverse: torch.Tensor | None

    def joined(self, known: float) -> torch.Tensor:
        """The rows in float32 (benchmarks and tests). `known`: their scale where `inverse` is None."""
        both = self.high.float() + self.low.float()
        return both / known if self.inverse is None else both * self.inverse[:, None]


def why_no_mma(capability: tuple[int, int], is_cuda: bool = True) -> str | None:
    """None on a GPU with these tensor cores and a Triton that reaches them, otherwise the reason."""
    if not is_cuda or capability[0] != 9:
        return "FP8 tensor cores with a matrix in registers (wgmma) are Hopper's, compute capability 9.0"
    return NO_GLUON


@triton.jit
def scaled_row(x):
    """x [K] float32 -> y = x / inverse, the largest in [128, 256), and inverse, a power of two; infinite -> NaN."""
    largest = tl.max(tl.abs(x), axis=0)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 8)
    scale = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    # e4m3 has no infinity, the conversion would make the largest number of it.
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x * scale), inverse


@triton.jit
def _split_row(x_ptr, high_ptr, low_ptr, inverse_ptr, row, K: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    y, inverse = scaled_row(x)
    high = y.to(tl.float8e4nv)
    where = row.to(tl.int64) * K + cols
    tl.store(high_ptr + where, high, mask=cols < K)
    low = low_bits(y - high.to(tl.float32)).to(tl.float8e5, bitcast=True)
    tl.store(low_ptr + where, low, mask=cols < K)
    tl.store(inverse_ptr + row, inverse)


@triton.jit
def _split_kernel(
    x_ptr, high_ptr, low_ptr, inverse_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _split_row(x_ptr, high_ptr, low_ptr, inverse_ptr, tl.program_id(0), K, BLOCK)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "num_align"])
def _prepare_kernel(
    ids_ptr, pairs_ptr, tiles_ptr, x_ptr, high_ptr, low_ptr, inverse_ptr, num_pairs, max_tiles, num_align,
    BLOCK_M: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, E_BLOCK: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs group pairs, the others split a row each."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_align:
        align_share(ids_ptr, pairs_ptr, tiles_ptr, program, num_pairs, max_tiles, BLOCK_M, SHARE, STEP, E_BLOCK)
    else:
        _split_row(x_ptr, high_ptr, low_ptr, inverse_ptr, program - num_align, K, BLOCK)


def _empty_rows(x: torch.Tensor) -> SplitRows:
    high, low = torch.empty_like(x, dtype=HIGH), torch.empty_like(x, dtype=LOW)
    return SplitRows(high, low, torch.empty(x.shape[0], dtype=torch.float32, device=x.device))


def split_rows(x: torch.Tensor, pdl: bool = True) -> SplitRows:
    """x [R, K] contiguous, any float dtype."""
    rows = _empty_rows(x)
    _split_kernel[(x.shape[0],)](
        x, rows.high, rows.low, rows.inverse, K=x.shape[1], BLOCK=power_of_2(x.shape[1]), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return rows


def group_and_split(
    x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, block_m: int, pdl: bool = True
) -> tuple[Grouping, SplitRows]:
    """x [T, K] contiguous, expert_ids [T, k] -> `group_pairs` and `split_rows`; one launch where pairs are few."""
    num_tokens, width = x.shape
    if expert_ids.numel() > MAX_SMALL_PAIRS:
        return group_pairs(expert_ids, num_experts, block_m, pdl), split_rows(x, pdl)
    grouping, rows = empty_grouping(expert_ids, num_experts, block_m), _empty_rows(x)
    num_align = num_shares(grouping)
    _prepare_kernel[(num_align + num_tokens,)](
        expert_ids, grouping.pairs, grouping.tiles, x, rows.high, rows.low, rows.inverse,
        expert_ids.numel(), grouping.max_tiles, num_align,
        BLOCK_M=block_m, SHARE=SMALL_SHARE, STEP=SMALL_STEP, E_BLOCK=expert_block(num_experts),
        K=width, BLOCK=power_of_2(width), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return grouping, rows


def hidden_scale(activation: Activation) -> float:
    """What h is multiplied by before it is split: a power of two; 0 where its size is not known before (no limit, or
    one so high that usual values would lose bits)."""
    limit = activation.limit
    if not limit or limit * (limit + 1) > MAX_HIGH or activation.alpha < 1:
        return 0.0
    return 2.0 ** math.floor(math.log2(MAX_HIGH / (limit * (limit + 1))))


def mma_gate_up(
    rows: SplitRows, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation, tile: MmaTile
) -> SplitRows:
    """rows of x [T, H] -> those of h [T * top_k, I], in the order of `grouping.pairs`."""
    shape, device = (grouping.pairs.shape[0], matrix.num_rows // 2), rows.high.device
    if hidden_scale(activation) == 0:
        h = torch.empty(shape, dtype=torch.bfloat16, device=device)
        _launch(rows, matrix, grouping, top_k, activation, True, None, h, None, tile)
        return split_rows(h)
    high, low = torch.empty(shape, dtype=HIGH, device=device), torch.empty(shape, dtype=LOW, device=device)
    _launch(rows, matrix, grouping, top_k, activation, True, None, high, low, tile)
    return SplitRows(high, low, None)


def mma_down(
    h: SplitRows, matrix: ExpertMatrix, grouping: Grouping, weights: torch.Tensor, activation: Activation,
    dtype: torch.dtype, tile: MmaTile,
) -> torch.Tensor:  # fmt: skip
    """h of `mma_gate_up`, weights [T, k] float32 -> parts [split_k, T * k, H] in `dtype`, by pair, weighted."""
    size = tile.split_k, grouping.pairs.shape[0], matrix.num_rows
    parts = torch.empty(size, dtype=dtype, device=h.high.device)
    _launch(h, matrix, grouping, weights.shape[1], activation, False, weights, parts, None, tile)
    return parts


def _launch(
    rows: SplitRows, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation, is_up: bool,
    weights: torch.Tensor | None, out: torch.Tensor, out_low: torch.Tensor | None, tile: MmaTile,
) -> None:  # fmt: skip
    assert product_kernel is not None, "`why_no_mma` has a reason"
    programs = grouping.max_tiles * ceil_div(matrix.num_rows, tile.block_n)
    constants = mma_constants(matrix, grouping.block_m, top_k, activation, is_up, tile)
    product_kernel[(programs, 1 if is_up else tile.split_k)](
        rows.high, rows.low, rows.inverse, matrix.weight, matrix.scale, matrix.bias, grouping.pairs, grouping.tiles,
        weights, out, out_low, grouping.max_tiles, grouping.pairs.shape[0],
        **constants, num_warps=tile.num_warps, launch_pdl=True,
    )  # fmt: skip


def mma_constants(
    matrix: ExpertMatrix, block_m: int, top_k: int, activation: Activation, is_up: bool, tile: MmaTile
) -> dict[str, object]:
    """The kernel's constants."""
    return {
        **product_constants(matrix, block_m, top_k, activation, is_up, tile.group_m),
        "BLOCK_N": tile.block_n,
        "CHUNKS": tile.chunks,
        "SPLIT_K": 1 if is_up else tile.split_k,
        "STAGES": tile.stages,
        "H_SCALE": hidden_scale(activation),
        "UNROLL": tile.unroll,
        "AT_ONCE": tile.at_once,
        "WARPS": tile.num_warps,
    }


def warm_up_mma(need: MoeNeed, block_m: int, tile: MmaTile, is_up: bool, parts_dtype: torch.dtype) -> None:
    """Compile what `mma_gate_up` or `mma_down` would launch on this GPU, without launching it."""
    assert product_kernel is not None, "`why_no_mma` has a reason"
    has_scale = hidden_scale(need.activation) > 0
    out = parts_dtype if not is_up else HIGH if has_scale else torch.bfloat16
    product_kernel.warmup(
        HIGH, LOW, torch.float32 if is_up or not has_scale else None, torch.uint8, torch.int32,
        need.dtype if need.has_bias else None, torch.int32, torch.int32, None if is_up else torch.float32, out,
        LOW if is_up and has_scale else None, 64, 64, grid=(1,),
        **mma_constants(warm_up_matrix(need, is_up), block_m, need.top_k, need.activation, is_up, tile),
        num_warps=tile.num_warps, launch_pdl=True,
    )  # fmt: skip
