"""GGUF block-quantized weights: kept packed for few rows, dense for many.

With few rows a step is bound by weight bytes, and a Q4 block has 0.28 of bf16's; with many rows a dense matrix unit
wins (2-core AMX machine, all linears of a 135M model, ms at 1 / 8 / 64 rows: int4 6.9 / 18 / 118, bf16 24 / 25 / 34).
So a layer keeps both forms and `apply` picks by the number of rows. Merged layers whose parts have different block
types, and types that `block_linear` does not take, are dense only.
"""

from __future__ import annotations

from typing import Literal

import torch

from tokenspeed.kernels.ops import BlockLinear, Ops
from tokenspeed.quantization.interface import LinearShape, WeightTensor
from tokenspeed.quantization.unquantized import DenseMethod, Range


class GGUFMethod(DenseMethod):
    """A dense weight plus its packed twin, when every part has one block type that `block_linear` takes."""

    def __init__(self, shape: LinearShape, ops: Ops, block_linear: BlockLinear) -> None:
        super().__init__(shape, ops)
        self._block_linear = block_linear
        self._raw: dict[int, torch.Tensor] = {}
        self._qtypes: set[str | None] = set()
        self._packed: object | None = None
        self.qtype: str | None = None

    def load(self, weight: WeightTensor, row_start: int, columns: Range | None, rows: Range | None) -> None:
        """See `LinearMethod.load`. A cut through the columns would cut blocks, so such a layer is dense only."""
        super().load(weight, row_start, columns, rows)
        whole_rows = columns is None or columns == (0, weight.shape[1])
        self._qtypes.add(weight.qtype if whole_rows else None)
        if whole_rows and weight.qtype in self._block_linear.qtypes:
            raw = weight.raw()
            self._raw[row_start] = raw if rows is None else raw[rows[0] : rows[1]]

    def finish(self) -> None:
        """See `LinearMethod.finish`."""
        super().finish()
        if len(self._qtypes) == 1:
            (qtype,) = self._qtypes
            if qtype is not None and qtype in self._block_linear.qtypes:
                parts = [self._raw[row_start] for row_start in sorted(self._raw)]
                raw = parts[0] if len(parts) == 1 else torch.cat(parts)
                self._packed = self._block_linear.pack(raw, qtype, self._shape.in_features)
                self.qtype = qtype
        self._raw.clear()

    @property
    def max_fused_rows(self) -> int:
        """See `LinearMethod.max_fused_rows`. Packed weights have no fused kernel; dense ones do as usual."""
        return 0 if self._packed is not None else super().max_fused_rows

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        if self._packed is not None and x.shape[0] <= self._block_linear.max_rows:
            return self._block_linear(x, self._packed, self.bias)
        return super().apply(x)


class GGUF:
    """Satisfies `Scheme`: every layer is a `GGUFMethod`."""

    name = "gguf"
    expert_format: Literal["dense", "mxfp4", "fp8_block"] = "dense"
    quantizes = False

    def __init__(self, ops: Ops, block_linear: BlockLinear, reason: str) -> None:
        self._ops = ops
        self._block_linear = block_linear
        self.reason = reason

    def declare(self, shape: LinearShape) -> GGUFMethod:
        """See `Scheme.declare`."""
        return GGUFMethod(shape, self._ops, self._block_linear)
