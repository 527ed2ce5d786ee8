"""Widens MXFP4 experts to dense ones for a large prompt, which multiplies each value thousands of times.

Formula   wide[e, n, k] = code[e, n, k] * 2^(scale - 127) in bfloat16, exactly (see `moe_mxfp4`)
Bytes     17 / 32 + 2 a value: GPT-OSS 20B's gate and up, 531 million values, 1.34 GB
Bound     memory: 0.32 ms for that at 4.26 TB/s, 0.47 ms with down. Worth it where the grouped kernels lose more by
          widening every value again for each tile of pairs.

The values lie in a scratch buffer that all layers of a size share: widen gate and up, multiply, widen down over them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix
from tokenspeed.kernels.triton.moe_mxfp4 import mxfp4_slots

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
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N rows of an expert by 128 columns. Columns run fastest over programs, so that pages are written whole."""
    CHUNKS: tl.constexpr = (K + 127) // 128
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    chunk = program % CHUNKS
    expert = (program // (CHUNKS * NUM_N)).to(tl.int64)
    rows = program // CHUNKS % NUM_N * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < N
    halves = chunk * 32 + tl.arange(0, 32)
    codes = tl.load(
        codes_ptr + expert * (N * (K // 4)) + rows[:, None] * (K // 4) + halves[None, :],
        mask=live[:, None] & (halves < K // 4)[None, :],
        other=0,
    )
    words = tl.load(scales_ptr + expert * (CHUNKS * N) + chunk * N + rows, mask=live, other=0)
    s0, s1, s2, s3 = mxfp4_slots(codes, words, wide_ptr.dtype.element_ty, PTX)
    # [N, block and half, two bits of the slot] -> by block, slot, half, which is the order of columns.
    slots = tl.join(tl.join(s0, s2), tl.join(s1, s3))
    values = tl.permute(tl.reshape(slots, (BLOCK_N, 4, 8, 4)), (0, 1, 3, 2))
    values = tl.reshape(values, (BLOCK_N, 128))
    cols = chunk * 128 + tl.arange(0, 128)
    if PDL:
        # Nobody reads the buffer any more.
        gdc_wait()
        gdc_launch_dependents()
    where = wide_ptr + expert * (N * K) + rows[:, None] * K + cols[None, :]
    tl.store(where, values, mask=live[:, None] & (cols < K)[None, :])


def widen(matrix: ExpertMatrix, scratch: torch.Tensor, hopper: bool) -> ExpertMatrix:
    """An MXFP4 matrix as a dense one in the first part of `scratch`, whose dtype is float32 or bfloat16.

    Args:
        hopper: see `moe_grouped`.
    """
    num_experts = matrix.weight.shape[0]
    assert matrix.format == "mxfp4" and matrix.scale is not None
    wide = scratch[: num_values(matrix)].view(num_experts, matrix.num_rows, matrix.width)
    programs = num_experts * triton.cdiv(matrix.num_rows, BLOCK_N) * triton.cdiv(matrix.width, 128)
    is_ptx = hopper and scratch.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    _widen_kernel[(programs,)](
        matrix.weight, matrix.scale, wide, N=matrix.num_rows, K=matrix.width, BLOCK_N=BLOCK_N,
        PTX=is_ptx, PDL=hopper, num_warps=4, launch_pdl=hopper,
    )  # fmt: skip
    return replace(matrix, format="dense", weight=wide, scale=None)
