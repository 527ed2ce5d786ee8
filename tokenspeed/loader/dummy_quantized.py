"""Random quantized weights, in place of a quantized checkpoint's: the layers then run the kernels that it would."""

from __future__ import annotations

import math

import torch

from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.loader.weights import DUMMY_STD, DummyWeight
from tokenspeed.quantization.fp8 import TOKEN_TABLE
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, E4M3_MAX, Fp8Tensor
from tokenspeed.quantization.interface import CPU

SCALE = 8 * DUMMY_STD / E4M3_MAX
"""Eight standard deviations fill the range."""


class DummyFp8Weight(DummyWeight):
    """As `DummyWeight`, and a `Fp8Source`."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, is_block: bool) -> None:
        super().__init__(name, shape, seed)
        self._is_block = is_block

    def fp8(self, device: torch.device) -> Fp8Tensor:
        """See `Fp8Source.fp8`."""
        rows, columns = self.shape
        weight = (self.read(torch.bfloat16, device) / SCALE).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        sizes = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)) if self._is_block else (rows,)
        return Fp8Tensor(weight, torch.full(sizes, SCALE, device=device))


class DummyBytes(DummyWeight):
    """Random MXFP4 blocks, and scales of 2 ** -9 to 2 ** -5, with which values are of the size of real weights."""

    is_raw = True
    smallest_scale, largest_scale = 118, 122

    def __init__(self, name: str, shape: tuple[int, ...], seed: int) -> None:
        super().__init__(name, shape, seed)
        self.nbytes = math.prod(shape)

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """uint8, made on the device."""
        assert dtype == torch.uint8, "bytes are not numbers"
        out = torch.empty(self.shape, dtype=torch.uint8, device=device)
        if self.name.endswith("_scales"):
            return out.random_(self.smallest_scale, self.largest_scale + 1, generator=self._generator(device))
        return out.random_(0, 256, generator=self._generator(device))


def dummy_weight(
    name: str, shape: tuple[int, ...], seed: int, config: QuantizationConfig | None, is_raw: bool = False
) -> DummyWeight:
    """The random stand-in for a tensor: e4m3, or MXFP4 bytes, where a checkpoint of this config would have it."""
    if is_raw:
        return DummyBytes(name, shape, seed)
    if config is not None and config.method == "mxfp4":
        return DummyWeight(name, shape, seed)
    module = name.removesuffix(".weight")
    is_matrix = len(shape) == 2 and module != name
    if config is None or not is_matrix or module == TOKEN_TABLE or config.is_ignored(module):
        return DummyWeight(name, shape, seed)
    return DummyFp8Weight(name, shape, seed, config.granularity == "block")
