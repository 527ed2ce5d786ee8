"""MXFP4 expert weights as our kernels read them: rearranged once after the load, in place, one copy for every kernel.

An E2M1 value s e e m in a bfloat16 at bits 15 and 8..6 is the value times 2^-126 (also 0.5, which is subnormal there),
so one multiplication by the bfloat16 2^(scale - 127 + 126) gives it exactly. A half (int16) holds four values, slots
0 to 3, so that few instructions bring each to those bits, and one instruction serves the two halves of a word:

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    slot 0   s                    e  e  m                      as it is
    slot 1            s                    e  e  m             << 3
    slot 2                     s                    e  e  m    << 6
    slot 3      s  m     e  e                                  << 1, >> 3, >> 7

Along K in blocks of 32 values, which share a scale, 8 halves: half c, slot s is k = 32 b + 8 s + c; so the two halves
of a word are neighbours in k, and a slot of a block goes with 8 neighbours of x.

    codes   int32 [E, N, K / 8], or the same as int16 [E, N, K / 4]
    scales  int32 [E, ceil(K / 128), N]: a byte for each of four blocks, the lowest first: the bfloat16 exponent of the
            factor above, scale + 126

A scale s stands for 2^(s - 127). The factor's exponent ends at s = 128: weights of 2 and more times a code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tokenspeed.protocol.errors import CheckpointError

BLOCK = 32
MAX_SCALE = 128
FACTOR_EXPONENT = 126
PACK_VALUES = 2**26
"""Values that are rearranged at once: the temporary memory is 10 bytes for each."""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """One matrix [N, K] of E experts; see the module."""

    codes: torch.Tensor
    scales: torch.Tensor


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, what: str) -> Mxfp4Weight:
    """Take over codes uint8 [E, N, K / 2], the low nibble first, contiguous, and read scales uint8 [E, N, K / 32].

    Args:
        what: names the matrix in an error.
    Raises:
        CheckpointError: a scale above 128 over codes that are not all zero.
    """
    num_experts, num_rows, half_width = codes.shape
    scales = _checked_scales(codes, scales, what)
    at_once = max(1, PACK_VALUES // (2 * num_rows * half_width))
    for start in range(0, num_experts, at_once):
        part = codes[start : start + at_once]
        part.copy_(_halves(part).view(torch.uint8).view(part.shape))
    biased = functional.pad(scales + FACTOR_EXPONENT, (0, -scales.shape[2] % 4))
    words = biased.contiguous().view(torch.int32).transpose(1, 2).contiguous()
    return Mxfp4Weight(codes.view(torch.int32), words)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [e, N, K / 2] -> int16 [e, N, K / 32, 8]."""
    parts = codes.view(*codes.shape[:2], -1, 4, 4)  # block, slot, byte: two neighbours in k
    halves: list[torch.Tensor] = []
    for nibbles in (parts & 15, parts >> 4):
        values = nibbles.to(torch.int16)
        sign, rest = values >> 3, values & 7
        near = (sign << 9) | rest
        half = (near[..., 0, :] << 6) | (near[..., 1, :] << 3) | near[..., 2, :]
        last = rest[..., 3, :]
        half |= (sign[..., 3, :] << 14) | ((last >> 1) << 10) | ((last & 1) << 13)
        halves.append(half)
    return torch.stack(halves, dim=-1)


def _checked_scales(codes: torch.Tensor, scales: torch.Tensor, what: str) -> torch.Tensor:
    largest = int(scales.max()) if scales.numel() else 0
    if largest <= MAX_SCALE:
        return scales
    is_zero = ((codes & 0x77).view(*scales.shape, BLOCK // 2) == 0).all(dim=-1)
    if bool(((scales > MAX_SCALE) & ~is_zero).any()):
        raise CheckpointError(
            f"{what}: an MXFP4 scale of {largest} (2^{largest - 127}); these kernels are exact up to {MAX_SCALE} "
            f"(2^{MAX_SCALE - 127}); serve it with another --moe-backend"
        )
    return torch.where(is_zero, torch.zeros_like(scales), scales)


@triton.jit
def _decode_ptx(halves, factors):
    """int16 halves [N, C] of four E2M1 values, factors bfloat16 [N, C] -> the values of slots 0 to 3, bfloat16 [N, C].

    Two halves an instruction; see the module."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, a, b, c, d;
        and.b32 a, $4, 0x81C081C0;
        shl.b32 t, $4, 3;
        and.b32 b, t, 0x81C081C0;
        shl.b32 t, $4, 6;
        and.b32 c, t, 0x81C081C0;
        shl.b32 t, $4, 1;
        and.b32 d, t, 0x80008000;
        shr.u32 t, $4, 3;
        lop3.b32 d, t, 0x01800180, d, 0xEA;
        shr.u32 t, $4, 7;
        lop3.b32 d, t, 0x00400040, d, 0xEA;
        mul.bf16x2 $0, a, $5;
        mul.bf16x2 $1, b, $5;
        mul.bf16x2 $2, c, $5;
        mul.bf16x2 $3, d, $5;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [halves, factors],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _factors(words, DTYPE: tl.constexpr):
    """Bytes 0 to 3 as exponents of bfloat16: four powers of two; bfloat16 where DTYPE is that, else float32.

    Two at a time: a product takes either half of a register."""
    even = (words & 0x00FF00FF) << 7
    odd = (words >> 1) & 0x7F807F80
    if tl.bfloat16 == DTYPE:
        f0 = even.to(tl.int16).to(tl.bfloat16, bitcast=True)
        f1 = odd.to(tl.int16).to(tl.bfloat16, bitcast=True)
        f2 = (even >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        f3 = (odd >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        f0 = (even << 16).to(tl.float32, bitcast=True)
        f1 = (odd << 16).to(tl.float32, bitcast=True)
        f2 = (even & -65536).to(tl.float32, bitcast=True)
        f3 = (odd & -65536).to(tl.float32, bitcast=True)
    return f0, f1, f2, f3


@triton.jit
def _from_bits(bits, factors):
    """Bits of a bfloat16 times a factor, in float32."""
    return (bits << 16).to(tl.float32, bitcast=True) * factors.to(tl.float32)


@triton.jit
def mxfp4_slots(halves, words, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """128 columns: halves int16 [N, 32], scale words int32 [N] -> the values of slots 0 to 3, each [N, 32] in DTYPE.

    Only views and arithmetic: then the compiler loads into the registers from which tensor cores take a matrix. An
    index (tl.arange) in between sends every value through shared memory.

    PTX: DTYPE is bfloat16 and the GPU has packed instructions for it.
    """
    N: tl.constexpr = halves.shape[0]
    f0, f1, f2, f3 = _factors(words, DTYPE)
    factors = tl.reshape(tl.join(tl.join(f0, f2), tl.join(f1, f3)), (N, 4, 1))
    factors = tl.reshape(tl.broadcast_to(factors, (N, 4, 8)), (N, 32))
    if PTX:
        s0, s1, s2, s3 = _decode_ptx(halves, factors)
    else:
        w = halves.to(tl.int32)
        s0 = _from_bits(w & 0x81C0, factors).to(DTYPE)
        s1 = _from_bits((w << 3) & 0x81C0, factors).to(DTYPE)
        s2 = _from_bits((w << 6) & 0x81C0, factors).to(DTYPE)
        s3 = _from_bits(((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040), factors).to(DTYPE)
    return s0, s1, s2, s3
