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


class Widener:
    """E2M1 bytes to numbers of one dtype on one device, by a table of the two values of every scale and byte.

    A pair of values moves as one integer: several times as fast on a CPU as looking up values and multiplying them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
        byte = torch.arange(256, device=device)
        factor = torch.exp2(torch.arange(256, device=device) - 127.0)
        factor[255] = torch.nan
        pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
        table = (factor[:, None, None] * pairs).to(dtype).view(-1, 2)
        self._table = table.view(torch.int64 if dtype.itemsize == 4 else torch.int32).view(-1)
        self._dtype = dtype

    def __call__(self, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """packed [..., N / 2], scale [..., N / 32] -> [..., N]: exact where the dtype has the value's range."""
        index = packed.view(*scale.shape, GROUP // 2).int()
        index |= (scale.int() << 8).unsqueeze(-1)
        return self._table.index_select(0, index.view(-1)).view(self._dtype).view(*packed.shape[:-1], -1)


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `Widener`; for one use."""
    return Widener(dtype, packed.device)(packed.contiguous(), scale)


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
