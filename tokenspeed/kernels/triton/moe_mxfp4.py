"""MXFP4 expert weights as our kernels read them: rearranged once after the load, one copy for every kernel.

The order is that of the matrix operand of Hopper's FP8 tensor cores (`moe_mxfp4_gluon`): 16 rows by 64 columns are 512
bytes that lie together, of which a thread of a warp takes 16 by one load and has the values it multiplies. A byte holds
two E2M1 codes of one row, columns c and c + 32 of its 64, so that either needs few instructions to become an e4m3
value times 2^-6, sign, exponent and mantissa at the bits where e4m3 has them:

    bit                 7  6  5  4  3  2  1  0
    e4m3                s  e  e  e  e  m  m  m
    column c            s        e  e  m           & 0x9C
    column c + 32          e  s           e  m     (<< 2) & 0x8C | (>> 2) & 0x10

    codes   uint8 [E, N / 16, ceil(K / 64), 512]: the byte of row r of 16 and column c of 32 is at
            (r / 2 * 4 + c % 16 / 4) * 16 + (r % 2 + c / 16 * 2) * 4 + c % 4                    (whole quotients)
    scales  int32 [E, ceil(K / 128), N]: a byte for each of four blocks of 32 columns, the lowest first: scale + 6, the
            exponent of a float32, in which the 2^6 of the codes is included

A scale s stands for 2^(s - 127); s up to 248 have an exponent. Where 64 does not divide K, zeros fill the last codes;
the last block's scale stands for those that are missing. A block of zeros may get another scale than it had.

    references  int32 [E, N]: 30 below the largest byte of a row's scales. A byte less its row's reference, 1 to 30, is
                the exponent of a float16 in which the scale itself would have none (`moe_mxfp4_fp16`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tokenspeed.protocol.errors import CheckpointError

BLOCK = 32
MAX_SCALE = 248
ROWS, COLUMNS, FRAGMENT_BYTES = 16, 64, 512
CODE_EXPONENT = 6
HALF_EXPONENT = 30
"""The largest of float16."""
MIN_REFERENCE = -14
"""Below, 2^(reference - 112), by which a row is multiplied in the end, would be subnormal."""
PACK_VALUES = 2**26
"""Values that are checked or rearranged at once: the temporary memory is about 6 bytes for each."""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """One matrix [N, K = `width`] of E experts; see the module. `references`: None where a row's scales are further
    apart than 29 binades."""

    codes: torch.Tensor
    scales: torch.Tensor
    references: torch.Tensor | None
    width: int


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, what: str) -> Mxfp4Weight:
    """Take over codes uint8 [E, N, K / 2], the low nibble first, contiguous, and read scales uint8 [E, N, K / 32].

    16 divides N, 32 divides K. Where 64 divides K, the codes are rearranged where they lie.

    Args:
        what: names the matrix in an error.
    Raises:
        CheckpointError: a scale above 248 over codes that are not all zero.
    """
    num_experts, num_rows, half_width = codes.shape
    scales = _checked_scales(codes, scales, what)
    width = 2 * half_width
    groups = -(-width // COLUMNS)
    size = num_experts, num_rows // ROWS, groups, FRAGMENT_BYTES
    packed = codes.view(size) if width % COLUMNS == 0 else codes.new_empty(size)
    for some in _parts(codes):
        packed[some] = _fragments(functional.pad(codes[some], (0, groups * COLUMNS // 2 - half_width)))
    biased = scales + CODE_EXPONENT
    missing = biased[:, :, -1:].expand(-1, -1, -scales.shape[2] % 4)
    words = torch.cat((biased, missing), dim=2).view(torch.int32).transpose(1, 2).contiguous()
    return Mxfp4Weight(packed, words, _references(biased), width)


def _parts(codes: torch.Tensor) -> list[slice]:
    """Experts of codes uint8 [E, N, K / 2] that are taken at once."""
    num_experts, num_rows, half_width = codes.shape
    at_once = max(1, PACK_VALUES // max(1, num_rows * half_width * 2))
    return [slice(start, min(start + at_once, num_experts)) for start in range(0, num_experts, at_once)]


def _references(biased: torch.Tensor) -> torch.Tensor | None:
    """Of bytes uint8 [E, N, K / 32]."""
    references = (biased.amax(dim=2).to(torch.int32) - HALF_EXPONENT).clamp(min=MIN_REFERENCE)
    return references if bool((biased.amin(dim=2) > references).all()) else None


def _fragments(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [e, N, K / 2], 64 divides K -> uint8 [e, N / 16, K / 64, 512]."""
    num_experts, num_rows, half_width = codes.shape
    # Sixteen rows, pair of rows, row; group, half of the group, 16 columns, four columns, byte.
    parts = codes.view(num_experts, num_rows // ROWS, 8, 2, half_width // 32, 2, 2, 4, 2)
    values = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(-2)
    first, second = values[:, :, :, :, :, 0], values[:, :, :, :, :, 1]
    byte = ((first & 8) << 4) | ((first & 7) << 2)
    byte |= ((second & 8) << 2) | ((second & 4) << 4) | (second & 3)
    order = byte.permute(0, 1, 4, 2, 6, 5, 3, 7)
    return order.reshape(num_experts, num_rows // ROWS, half_width // 32, FRAGMENT_BYTES)


def _checked_scales(codes: torch.Tensor, scales: torch.Tensor, what: str) -> torch.Tensor:
    """`scales`, or others for blocks of zeros, where those are too large or far from the rest of their row."""
    if not scales.numel():
        return scales
    return torch.cat([_checked_part(codes[some], scales[some], what) for some in _parts(codes)])


def _checked_part(codes: torch.Tensor, scales: torch.Tensor, what: str) -> torch.Tensor:
    largest, smallest = scales.amax(dim=2, keepdim=True), scales.amin(dim=2, keepdim=True)
    if not bool(((largest > MAX_SCALE) | (largest - smallest >= HALF_EXPONENT)).any()):
        return scales
    is_zero = ((codes & 0x77).view(*scales.shape, BLOCK // 2) == 0).all(dim=-1)
    largest = scales.masked_fill(is_zero, 0).amax(dim=2, keepdim=True)
    highest = int(largest.max())
    if highest > MAX_SCALE:
        raise CheckpointError(
            f"{what}: an MXFP4 scale of {highest} (2^{highest - 127}); the kernels of a GPU are exact up to "
            f"{MAX_SCALE} (2^{MAX_SCALE - 127}); serve it with --device cpu"
        )
    return torch.where(is_zero, largest, scales)


@triton.jit
def low_bits(rest):
    """float32 -> the bits of an e5m2, halves away from zero, of numbers far below its largest; NaN -> anything finite.

    By way of float16, whose upper byte an e5m2 is, and by hand: ptxas 12.8 with Triton 3.6 gives garbage for the pairs
    of `cvt.rn.satfinite.e5m2x2.f32` that `.to(tl.float8e5)` becomes. Gluon compiles the same function for itself."""
    half = rest.to(tl.float16).to(tl.int16, bitcast=True)
    return ((half + 128) >> 8).to(tl.int8)


@triton.jit
def _times_scale(bits, word, block):
    """float32 bits of codes times 2^-126, exactly times 2^126 and 2^(scale - 127); block [..] of 0 to 3."""
    factor = (((word >> (block * 8)) & 255) << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor  # 2^120: the byte has the other 2^6


@triton.jit
def mxfp4_values(fragments, words, block):
    """Plain arithmetic for any GPU: fragments uint8 [N / 16, 512], which are one group of 64 columns, and words of
    scales [N] -> float32 values of columns 0 to 31 and 32 to 63, each [N, 32].

    Args:
        block: 0 or 2, the place of the first columns' scale in a word.
    """
    N: tl.constexpr = fragments.shape[0] * 16
    # Sixteen rows, pair of rows, four columns, 16 columns, row, byte -> by row, by column.
    bytes = tl.permute(tl.reshape(fragments, (N // 16, 8, 4, 2, 2, 4)), (0, 1, 4, 3, 2, 5))
    codes = tl.reshape(bytes, (N, 32)).to(tl.int32)
    first = ((codes & 0x80) << 24) | ((codes & 0x1C) << 20)
    second = ((codes & 0x20) << 26) | ((codes & 0x40) << 18) | ((codes & 3) << 22)
    return _times_scale(first, words[:, None], block), _times_scale(second, words[:, None], block + 1)
