"""Random e4m3 weights with scales, in place of an fp8 checkpoint's: the layers then run the kernels that it would."""

from __future__ import annotations

import math

import torch

from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.loader.weights import DUMMY_STD, DummyWeight
from tokenspeed.quantization.fp8 import TOKEN_TABLE
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, E4M3_MAX, Fp8Tensor

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


def dummy_weight(name: str, shape: tuple[int, ...], seed: int, config: QuantizationConfig | None) -> DummyWeight:
    """The random stand-in for a tensor: e4m3 where a checkpoint of this config would have it."""
    module = name.removesuffix(".weight")
    is_matrix = len(shape) == 2 and module != name
    if config is None or not is_matrix or module == TOKEN_TABLE or config.is_ignored(module):
        return DummyWeight(name, shape, seed)
    return DummyFp8Weight(name, shape, seed, config.granularity == "block")
