"""Experts on tensor cores: one GEMM over the tiles of `moe_align`, once for gate and up, once for down; then the sum.

Formula   h[i] = activation(W_gate_up[e] x[t] + b), i = place of pair (t, j) among the pairs sorted by expert e
          part[t, j] = weights[t, j] (W_down[e] h[i] + b);  out[t] = residual[t] + sum over j of part[t, j], in order
Bytes     few tokens: each distinct expert's matrices once. Operations 6 T k H I.
Bound     on an H200 4.26 TB/s for few tokens, 808 TFLOP/s bf16 for a prompt.

Weights are the tall operand, acc[BLOCK_N, BLOCK_M] = W[BLOCK_N, K] x[BLOCK_M, K].T, so that 16 tokens fill a tensor
core. Weights kept in 8 bits are widened to bfloat16 in the registers from which the tensor core takes them. MXFP4 goes
by plain arithmetic and shared memory to the activations' dtype, on GPUs and in dtypes that `moe_mxfp4_mma` does not
serve; its speed was not looked at. Tiles are numbered so that programs that run at the same time share the weights of
an expert and rows of x in L2.

`hopper`: the GPU is an NVIDIA one of compute capability 9.0 or later. Then all launches use programmatic dependent
launch, and packed instructions widen e4m3 weights; elsewhere plain arithmetic does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed.kernels.triton.e4m3 import widen_e4m3
from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.kernels.triton.moe_align import Grouping
from tokenspeed.kernels.triton.moe_mxfp4 import Mxfp4Weight, mxfp4_values
from tokenspeed.kernels.triton.prefetch import prefetch_l2
from tokenspeed.moe.interface import Activation, ExpertFormat, MoeNeed

SCALE_BLOCK = tl.constexpr(128)
"""Rows and columns of e4m3 weights that share a scale; columns whose MXFP4 scales lie together."""
MXFP4_COLUMNS = 64
"""Of a step: a fragment of `moe_mxfp4`."""


@triton.jit
def _activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """See `moe.interface.Activation`; LIMIT 0 = none. A NaN stays one."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return gate * tl.sigmoid(ALPHA * gate) * up


@triton.jit
def _add_product(
    acc, w_ptr, w_row, scale_row, x_row, start,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + W[:, start : start + BLOCK_K] x[:, ...].T. Pointers to the first column: w_row [BLOCK_N, 1] (MXFP4: to the
    first byte of every sixteen rows, [BLOCK_N / 16, 1]; TMA: the first row's number in the descriptor w_ptr), x_row
    [1, BLOCK_M], scale_row [BLOCK_N]."""
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    cols = start + tl.arange(0, BLOCK_K)
    if FORMAT == "mxfp4":
        fragments = tl.load(w_row + (start // 64 * 512 + tl.arange(0, 512))[None, :])
        words = tl.load(scale_row + start // 128 * SCALE_STRIDE)
        low, high = mxfp4_values(fragments, words, start // 32 % 4)
        half = start + tl.arange(0, 32)
        acc = tl.dot(low.to(DTYPE), _load_x(x_row, half, K, WHOLE), acc, input_precision=PRECISION)
        acc = tl.dot(high.to(DTYPE), _load_x(x_row, half + 32, K, WHOLE), acc, input_precision=PRECISION)
    else:
        if TMA:
            w = w_ptr.load([w_row, start])
        elif WHOLE:
            w = tl.load(w_row + cols[None, :])
        else:
            w = tl.load(w_row + cols[None, :], mask=(cols < K)[None, :], other=0.0)
        x = _load_x(x_row, cols, K, WHOLE)
        if FORMAT == "fp8_block":
            scale = tl.load(scale_row + start // SCALE_BLOCK * SCALE_STRIDE)
            acc += tl.dot(widen_e4m3(w, DTYPE, PTX), x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_x(x_row, cols, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        x = tl.load(x_row + cols[:, None])
    else:
        x = tl.load(x_row + cols[:, None], mask=(cols < K)[:, None], other=0.0)
    return x


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def _grouped_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    route_ptr,
    y_ptr,
    max_tiles,
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    IS_UP: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of pairs times BLOCK_N weight rows (and a part of K).

    IS_UP: x [T, K] by pair // TOP_K, N = 2 I interleaved rows, y = h [P, I] by place. Otherwise x = h [P, K] by place,
    y = parts [SPLIT_K, P, N] by pair, times the pair's weight.
    """
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    group = program // (GROUP_M * NUM_N)
    group_tiles = min(max_tiles - group * GROUP_M, GROUP_M)
    inner = program % (GROUP_M * NUM_N)
    tile = group * GROUP_M + inner % group_tiles
    first_row = inner // group_tiles * BLOCK_N
    split = tl.program_id(1)
    if PDL and IS_UP:
        gdc_wait()
    # The launch of down has the tiles before its turn: gate and up waited for them. From L2: an SM may still have older
    # ones in its own cache.
    expert = tl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        return
    places = tl.load(tiles_ptr + max_tiles + tile, cache_modifier=".cg") + tl.arange(0, BLOCK_M)
    end = tl.load(tiles_ptr + 2 * max_tiles + tile, cache_modifier=".cg")
    live = places < end
    pairs = tl.load(pairs_ptr + tl.minimum(places, end - 1), cache_modifier=".cg")
    rows = first_row + tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        safe_rows = tl.minimum(rows, N - 1)
    else:
        safe_rows = rows
    wide_expert = expert.to(tl.int64)
    SCALE_STRIDE: tl.constexpr = N if FORMAT == "mxfp4" else 1
    if FORMAT == "mxfp4":
        scale_row = scale_ptr + wide_expert * ((K + SCALE_BLOCK - 1) // SCALE_BLOCK * N) + safe_rows
    else:
        scale_row = scale_ptr
        if FORMAT == "fp8_block":
            COLUMN_BLOCKS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
            if IS_UP:
                HALF_BLOCKS: tl.constexpr = (N // 2 + SCALE_BLOCK - 1) // SCALE_BLOCK
                block_row = safe_rows % 2 * HALF_BLOCKS + safe_rows // 2 // SCALE_BLOCK
                scale_row += (wide_expert * (2 * HALF_BLOCKS) + block_row) * COLUMN_BLOCKS
            else:
                ROW_BLOCKS: tl.constexpr = (N + SCALE_BLOCK - 1) // SCALE_BLOCK
                scale_row += (wide_expert * ROW_BLOCKS + safe_rows // SCALE_BLOCK) * COLUMN_BLOCKS
    if TMA:
        # Rows past this expert's are the next one's, or zeros; they are not stored.
        w_row = expert * N + first_row
    elif FORMAT == "mxfp4":
        SIXTEEN_STRIDE: tl.constexpr = (K + 63) // 64 * 512
        sixteens = tl.minimum(first_row // 16 + tl.arange(0, BLOCK_N // 16), N // 16 - 1)
        w_row = w_ptr + wide_expert * (N // 16 * SIXTEEN_STRIDE) + (sixteens * SIXTEEN_STRIDE)[:, None]
    else:
        w_row = w_ptr + wide_expert * (N * K) + (safe_rows * K)[:, None]
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SPAN: tl.constexpr = (BLOCKS_K + SPLIT_K - 1) // SPLIT_K * BLOCK_K
    start_k = split * SPAN
    if PDL:
        if PREFETCH_LINES > 0:
            per_line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
            lines = tl.arange(0, PREFETCH_LINES) * per_line
            prefetch_l2((w_row + start_k + lines[None, :]).to(tl.int64, bitcast=True))
        if not IS_UP:
            gdc_wait()
        gdc_launch_dependents()
    if IS_UP:
        x_row = x_ptr + ((pairs // TOP_K).to(tl.int64) * K)[None, :]
    else:
        x_row = x_ptr + (tl.minimum(places, end - 1).to(tl.int64) * K)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(start_k, min(start_k + SPAN, K), BLOCK_K, num_stages=STAGES):
        acc = _add_product(
            acc, w_ptr, w_row, scale_row, x_row, start,
            K, SCALE_STRIDE, BLOCK_N, BLOCK_K, FORMAT, TMA, PTX, PRECISION,
        )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * N + rows, mask=rows < tl.where(split == 0, N, 0), other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if IS_UP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        h = _activate(gate, up, LIMIT, ALPHA)
        h_cols = first_row // 2 + tl.arange(0, BLOCK_N // 2)
        where = places.to(tl.int64)[None, :] * (N // 2) + h_cols[:, None]
        tl.store(y_ptr + where, h.to(y_ptr.dtype.element_ty), mask=live[None, :] & (h_cols < N // 2)[:, None])
    else:
        acc *= tl.load(route_ptr + pairs)[None, :]
        where = (split.to(tl.int64) * num_pairs + pairs)[None, :] * N + rows[:, None]
        tl.store(y_ptr + where, acc.to(y_ptr.dtype.element_ty), mask=live[None, :] & (rows < N)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    parts_ptr,
    residual_ptr,
    y_ptr,
    num_tokens,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, BLOCK columns: residual + the sum of its parts, experts in the router's order."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        for split in tl.static_range(SPLIT_K):
            row = (split * num_tokens + token) * TOP_K + choice
            total += tl.load(parts_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    where = token * H + cols
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + where, total.to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Weight rows and columns of a tile, programs that share an output (down only), pipeline stages, warps, tiles of
    pairs that share weights in L2, 128-byte lines of each weight row brought into L2 before the turn (down; not MXFP4),
    and weights by Hopper's copy engine (dense only). Columns are as `_block_k` says for other formats."""

    block_n: int = 128
    block_k: int = 64
    split_k: int = 1
    stages: int = 4
    num_warps: int = 4
    group_m: int = 1
    prefetch_lines: int = 0
    tma: bool = False


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix [N, K] of E experts; form and scales as in `moe.interface.ExpertWeights`, MXFP4 as in `moe_mxfp4`
    (`reference`: its `references`)."""

    format: ExpertFormat
    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    num_rows: int
    width: int
    reference: torch.Tensor | None = None


def expert_matrix(
    format: ExpertFormat, weight: torch.Tensor | Mxfp4Weight, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> ExpertMatrix:
    """Put one together; `weight` contiguous."""
    if isinstance(weight, Mxfp4Weight):
        num_rows = weight.scales.shape[2]
        return ExpertMatrix(format, weight.codes, weight.scales, bias, num_rows, weight.width, weight.references)
    return ExpertMatrix(format, weight, scale, bias, weight.shape[1], weight.shape[2])


def warm_up_matrix(need: MoeNeed, is_up: bool) -> ExpertMatrix:
    """One without weights: what a kernel's constants depend on, to compile it before there are any."""
    hidden, inner = need.hidden_size, need.intermediate_size
    rows, width = (2 * inner, hidden) if is_up else (hidden, inner)
    return ExpertMatrix(need.format, torch.empty(0), None, torch.empty(0) if need.has_bias else None, rows, width)


def product_constants(
    matrix: ExpertMatrix, block_m: int, top_k: int, activation: Activation | None, is_up: bool, group_m: int
) -> dict[str, object]:
    """Constants that all kernels of experts by tiles of pairs have; of `activation` where `is_up`."""
    limit = activation.limit if activation is not None and is_up else None
    return {
        "N": matrix.num_rows,
        "K": matrix.width,
        "TOP_K": top_k,
        "BLOCK_M": block_m,
        "GROUP_M": group_m,
        "IS_UP": is_up,
        "LIMIT": limit or 0.0,
        "ALPHA": activation.alpha if activation is not None and limit is not None else 1.0,
        "HAS_BIAS": matrix.bias is not None,
    }


def grouped_gate_up(
    x: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation,
    tile: GroupedTile, hopper: bool = True,
) -> torch.Tensor:  # fmt: skip
    """x [T, H] contiguous -> h [T * top_k, I] in x's dtype, rows in the order of `grouping.pairs`."""
    h = x.new_empty(x.shape[0] * top_k, matrix.num_rows // 2)
    _launch(x, matrix, grouping, top_k, activation, None, h, tile, hopper)
    return h


def grouped_down(
    h: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, weights: torch.Tensor, dtype: torch.dtype,
    tile: GroupedTile, hopper: bool = True,
) -> torch.Tensor:  # fmt: skip
    """h of `grouped_gate_up`, weights [T, k] float32 -> parts [split_k, T * k, H] in `dtype`, by pair, weighted."""
    parts = torch.empty(tile.split_k, h.shape[0], matrix.num_rows, dtype=dtype, device=h.device)
    _launch(h, matrix, grouping, weights.shape[1], None, weights, parts, tile, hopper)
    return parts


def _launch(
    x: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation | None,
    weights: torch.Tensor | None, out: torch.Tensor, tile: GroupedTile, hopper: bool,
) -> None:  # fmt: skip
    is_up = activation is not None
    programs = grouping.max_tiles * ceil_div(matrix.num_rows, tile.block_n)
    weight = _descriptor(matrix.weight.view(-1, matrix.width), tile) if tile.tma else matrix.weight
    _grouped_kernel[(programs, 1 if is_up else tile.split_k)](
        x, weight, matrix.scale, matrix.bias, grouping.pairs, grouping.tiles, weights, out,
        grouping.max_tiles, grouping.pairs.shape[0],
        **grouped_constants(matrix, grouping.block_m, top_k, activation, tile, x.dtype, hopper),
        num_warps=tile.num_warps, launch_pdl=hopper,
    )  # fmt: skip


def _descriptor(rows: torch.Tensor, tile: GroupedTile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [tile.block_n, tile.block_k])


def warm_up_grouped(need: MoeNeed, block_m: int, tile: GroupedTile, is_up: bool, out_dtype: torch.dtype) -> None:
    """Compile what `grouped_gate_up` or `grouped_down` would launch on this Hopper GPU, without launching it."""
    matrix = warm_up_matrix(need, is_up)
    weight, scale = {
        "dense": (need.dtype, None),
        "mxfp4": (torch.uint8, torch.int32),
        "fp8_block": (torch.float8_e4m3fn, torch.float32),
    }[need.format]
    if tile.tma:
        weight = _descriptor(torch.empty(tile.block_n, matrix.width, dtype=need.dtype, device=need.device), tile)
    _grouped_kernel.warmup(
        need.dtype, weight, scale, need.dtype if need.has_bias else None, torch.int32, torch.int32,
        None if is_up else torch.float32, out_dtype, 64, 64, grid=(1,),
        **grouped_constants(matrix, block_m, need.top_k, need.activation if is_up else None, tile, need.dtype, True),
        num_warps=tile.num_warps, launch_pdl=True,
    )  # fmt: skip


def grouped_constants(
    matrix: ExpertMatrix, block_m: int, top_k: int, activation: Activation | None, tile: GroupedTile,
    dtype: torch.dtype, hopper: bool,
) -> dict[str, object]:  # fmt: skip
    """The kernel's constants; `activation` None = the down matrix. `hopper`: see the module."""
    is_up = activation is not None
    is_ptx = hopper and dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    return {
        **product_constants(matrix, block_m, top_k, activation, is_up, tile.group_m),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": _block_k(matrix.format, tile),
        "SPLIT_K": 1 if is_up else tile.split_k,
        "STAGES": tile.stages,
        "FORMAT": matrix.format,
        "TMA": tile.tma,
        "PTX": is_ptx,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PREFETCH_LINES": 0 if is_up or tile.tma or matrix.format == "mxfp4" else tile.prefetch_lines,
        "PDL": hopper,
    }


def _block_k(format: ExpertFormat, tile: GroupedTile) -> int:
    return {"dense": tile.block_k, "mxfp4": MXFP4_COLUMNS, "fp8_block": SCALE_BLOCK.value}[format]


def combine(
    parts: torch.Tensor, num_tokens: int, top_k: int, residual: torch.Tensor | None, dtype: torch.dtype,
    hopper: bool = True,
) -> torch.Tensor:  # fmt: skip
    """parts of `grouped_down` -> [T, H] in `dtype`: residual itself, added to in place, when given."""
    split_k, _, width = parts.shape
    out = torch.empty(num_tokens, width, dtype=dtype, device=parts.device) if residual is None else residual
    block = min(1024, power_of_2(width))
    _combine_kernel[(num_tokens, ceil_div(width, block))](
        parts, residual, out, num_tokens, H=width, TOP_K=top_k, SPLIT_K=split_k, BLOCK=block,
        HAS_RESIDUAL=residual is not None, PDL=hopper, num_warps=4, launch_pdl=hopper,
    )  # fmt: skip
    return out
