"""A checkpoint's tensor that is in memory already, for tests of any room that load weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.quantization import interface


@dataclass
class MemoryWeight:
    """A `WeightTensor` in a float dtype."""

    name: str
    tensor: torch.Tensor
    qtype: str | None = None

    @property
    def where(self) -> str:
        return f"memory: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, dtype: torch.dtype, device: torch.device = interface.CPU) -> torch.Tensor:
        return self.tensor.to(device, dtype, copy=True)

    def raw(self) -> torch.Tensor:
        raise AssertionError("not quantized")
