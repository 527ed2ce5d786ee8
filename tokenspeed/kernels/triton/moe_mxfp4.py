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
