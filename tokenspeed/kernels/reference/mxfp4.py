"""E2M1 values with an E8M0 scale for each 32 along a row (OCP Microscaling Formats 1.0), as tensors of bytes.

packed [..., N / 2] uint8   value 2 i in the low nibble of byte i, 2 i + 1 in the high one
scale  [..., N / 32] uint8  2 ** (scale - 127); 255 is NaN
nibble s e e m              0 0.5 1 1.5 2 3 4 6, negative with s
"""

from __future__ import annotations

import torch

GROUP = 32
LARGEST = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in `dtype`: exact in bfloat16 and float32 where the result is in their range."""
    # A table of the two values of every scale and byte; a pair moves as one integer. 16 million values take 0.05 s on a
    # CPU, and seven times that by looking up values and multiplying them.
    table = _pairs(dtype, packed.device).view(torch.int64 if dtype.itemsize == 4 else torch.int32).view(-1)
    index = packed.view(*scale.shape, GROUP // 2).int() + (scale.int() << 8).unsqueeze(-1)
    return table.index_select(0, index.view(-1)).view(dtype).view(*packed.shape[:-1], -1)


def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256 scales * 256 bytes, 2]."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    factor = torch.exp2(torch.arange(256, device=device) - 127.0)
    factor[255] = torch.nan
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return (factor[:, None, None] * pairs).to(dtype).view(-1, 2)


def quantize(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N], N a multiple of 32 -> packed and scale. The scale's exponent is that of the largest magnitude less 2,
    values are rounded to the nearest, ties to even, and cut off at 6 (OCP MX 1.0, section 6.3)."""
    groups = dense.float().contiguous().view(*dense.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1)
    _, exponent = torch.frexp(largest)  # largest = m * 2 ** exponent, m in [0.5, 1)
    exponent = torch.where(largest > 0, exponent - 3, torch.zeros_like(exponent)).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    magnitudes = torch.tensor(_MAGNITUDES, device=dense.device)
    above = torch.bucketize(scaled.abs(), magnitudes).clamp(1, 7)
    to_above, to_below = magnitudes[above] - scaled.abs(), scaled.abs() - magnitudes[above - 1]
    code = torch.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, above - 1)
    nibbles = (code | torch.where(scaled < 0, 8, 0)).to(torch.uint8).flatten(-2)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), (exponent + 127).to(torch.uint8)
