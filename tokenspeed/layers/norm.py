"""RMSNorm layers: one weight, applied alone, fused with the residual addition, or handed to the qkv kernel."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, Entry, read_exact
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import WeightTensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last `size` values (Zhang & Sennrich 2019).

    Args:
        name: HF name without `.weight`.
    """

    def __init__(self, size: int, eps: float, ops: Ops, name: str) -> None:
        self._size = size
        self._ops = ops
        self._name = name
        self._weight: torch.Tensor | None = None
        self.eps = eps

    @property
    def weight(self) -> torch.Tensor:
        """[size], the model's dtype; after the load."""
        assert self._weight is not None, "used before finish"
        return self._weight

    def entries(self) -> Entries:
        return {f"{self._name}.weight": Entry((self._size,), self._load)}

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: the weight never came.
        """
        if self._weight is None:
            raise CheckpointError(f"{self._name}.weight was not in the checkpoint")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> its norm, a new tensor."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place, then the norm of residual. Both [T, size]."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def _load(self, weight: WeightTensor) -> None:
        self._weight = read_exact(weight, (self._size,), self._ops)
