"""Widens MXFP4 experts to dense ones for a large prompt, which multiplies each value thousands of times.

Formula   wide[e, n, k] = code[e, n, k] * 2^(scale - 127) in bfloat16, exactly (see `moe_mxfp4`)
Bytes     17 / 32 + 2 a value: GPT-OSS 20B's gate and up, 531 million values, 1.34 GB
Bound     memory: 0.32 ms for that at 4.26 TB/s, 0.47 ms with down. Worth it where an expert has so many pairs
          that dense products are faster than those of `moe_mxfp4_mma` by more than that.

The values lie in a scratch buffer that all layers of a size share: widen gate and up, multiply, widen down over them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix
from tokenspeed.kernels.triton.moe_mxfp4 import mxfp4_values

BLOCK_N = 64
"""Rows of a program, by 128 columns: 4.5 KB in, 16 KB out, and enough of them at a time to hide the memory."""


class WideScratch:
    """Scratch buffers of one device, one for each size asked for, never freed: a recorded graph keeps an address.

    All users are on one stream, so that each is done with a buffer before the next one writes it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def has(self, num_values: int, dtype: torch.dtype) -> bool:
        return (num_values, dtype) in self._buffers

    def get(self, num_values: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[num_values]; allocated by the first call."""
        key = num_values, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(num_values, dtype=dtype, device=device)
        return self._buffers[key]


def num_values(matrix: ExpertMatrix) -> int:
    """Values of all experts of a matrix."""
    return matrix.weight.shape[0] * matrix.num_rows * matrix.width


@triton.jit
def _widen_kernel(
    codes_ptr,
    scales_ptr,
    wide_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N rows of an expert by 128 columns. Columns run fastest over programs, so that pages are written whole."""
    CHUNKS: tl.constexpr = (K + 127) // 128
    GROUPS: tl.constexpr = (K + 63) // 64
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    chunk = program % CHUNKS
    expert = (program // (CHUNKS * NUM_N)).to(tl.int64)
    first_row = program // CHUNKS % NUM_N * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    # Fragments by group, then by sixteen rows: what two groups give is joined along columns.
    sixteens = first_row // 16 + tl.arange(0, BLOCK_N // 16)
    where = codes_ptr + expert * (N // 16 * GROUPS * 512) + (sixteens * (GROUPS * 512) + chunk * 1024)[:, None]
    where = where + tl.arange(0, 512)[None, :]
    num_far = tl.where(chunk * 2 + 1 < GROUPS, N // 16, 0)
    words = tl.load(scales_ptr + expert * (CHUNKS * N) + chunk * N + rows, mask=rows < N, other=0)
    near = tl.load(where, mask=(sixteens < N // 16)[:, None], other=0)
    far = tl.load(where + 512, mask=(sixteens < num_far)[:, None], other=0)
    v0, v1 = mxfp4_values(near, words, 0)
    v2, v3 = mxfp4_values(far, words, 2)
    # [N, 32 columns, bit 0 and bit 1 of the block] -> by block, by column.
    DTYPE: tl.constexpr = wide_ptr.dtype.element_ty
    blocks = tl.join(tl.join(v0.to(DTYPE), v2.to(DTYPE)), tl.join(v1.to(DTYPE), v3.to(DTYPE)))
    values = tl.reshape(tl.permute(tl.reshape(blocks, (BLOCK_N, 32, 4)), (0, 2, 1)), (BLOCK_N, 128))
    cols = chunk * 128 + tl.arange(0, 128)
    if PDL:
        # Nobody reads the buffer any more.
        gdc_wait()
        gdc_launch_dependents()
    where = wide_ptr + expert * (N * K) + rows[:, None] * K + cols[None, :]
    tl.store(where, values, mask=(rows < N)[:, None] & (cols < K)[None, :])


def widen(matrix: ExpertMatrix, scratch: torch.Tensor, hopper: bool) -> ExpertMatrix:
    """An MXFP4 matrix as a dense one in the first part of `scratch`, whose dtype is float32 or bfloat16.

    Args:
        hopper: see `moe_grouped`.
    """
    num_experts = matrix.weight.shape[0]
    assert matrix.format == "mxfp4" and matrix.scale is not None
    wide = scratch[: num_values(matrix)].view(num_experts, matrix.num_rows, matrix.width)
    programs = num_experts * triton.cdiv(matrix.num_rows, BLOCK_N) * triton.cdiv(matrix.width, 128)
    _widen_kernel[(programs,)](
        matrix.weight, matrix.scale, wide, N=matrix.num_rows, K=matrix.width, BLOCK_N=BLOCK_N,
        PDL=hopper, num_warps=4, launch_pdl=hopper,
    )  # fmt: skip
    return replace(matrix, format="dense", weight=wide, scale=None)
