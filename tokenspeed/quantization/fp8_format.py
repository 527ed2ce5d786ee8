"""Weights in e4m3 (OCP FP8: 4 exponent bits, 3 of mantissa, largest value 448) with float32 scales.

    scale by row:    [out]                               dense[n, k] = weight[n, k] * scale[n]
    scale by block:  [ceil(out / 128), ceil(in / 128)]   dense[n, k] = weight[n, k] * scale[n // 128, k // 128]

A scale of the whole tensor is one a row, all equal: then layers whose parts have different scales merge like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    """weight e4m3 [out, in]; scale float32, see above."""

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def is_block(self) -> bool:
        return self.scale.dim() == 2

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] in `dtype`, rounded once, from float32."""
        scale = self.scale[:, None]
        if self.is_block:
            num_rows, width = self.weight.shape
            scale = self.scale.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :width]
        return (self.weight.float() * scale).to(dtype)

    def cut(self, columns: tuple[int, int] | None, rows: tuple[int, int] | None) -> Fp8Tensor | None:
        """The part `[rows, columns]` (half-open; None = all), or None where that would cut a block of scales."""
        weight, scale = self.weight, self.scale
        if rows is not None:
            first, last = rows
            if self.is_block and (first % BLOCK or (last % BLOCK and last != self.weight.shape[0])):
                return None
            weight = weight[first:last]
            scale = scale[first // BLOCK : -(-last // BLOCK)] if self.is_block else scale[first:last]
        if columns is not None:
            first, last = columns
            weight = weight[:, first:last]
            if self.is_block:
                if first % BLOCK or (last % BLOCK and last != self.weight.shape[1]):
                    return None
                scale = scale[:, first // BLOCK : -(-last // BLOCK)]
        return Fp8Tensor(weight, scale)


@runtime_checkable
class Fp8Source(Protocol):
    """A `WeightTensor` that has an e4m3 form."""

    def fp8(self, device: torch.device) -> Fp8Tensor:
        """The whole tensor on the device; in place of `read`, as a tensor is read once."""
        ...


def quantize(dense: torch.Tensor) -> Fp8Tensor:
    """[out, in] -> e4m3 with a scale a row: absmax / 448, so that each row uses the whole range."""
    wide = dense.float()
    scale = (wide.abs().amax(dim=1) / E4M3_MAX).clamp_min(1e-12)
    return Fp8Tensor((wide / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale)


def quantize_blocks(dense: torch.Tensor) -> Fp8Tensor:
    """[out, in] -> e4m3 with a scale a block of 128 x 128: absmax / 448."""
    rows, columns = dense.shape
    padded = torch.nn.functional.pad(dense.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)) / E4M3_MAX).clamp_min(1e-12)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return Fp8Tensor(scaled.view(padded.shape)[:rows, :columns].to(E4M3), scale)
