"""Dense weights in the model's dtype. Block-quantized tensors are dequantized while they load."""

from __future__ import annotations

from typing import Literal

import torch

from tokenspeed.kernels.ops import Ops
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import LinearShape, WeightTensor

Range = tuple[int, int]


class DenseMethod:
    """One dense weight [out_features, in_features], filled part by part. Satisfies `LinearMethod`."""

    def __init__(self, shape: LinearShape, ops: Ops) -> None:
        self._shape = shape
        self._ops = ops
        self._loaded: list[Range] = []
        self._bias_loaded: list[Range] = []
        self.dense: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def load(self, weight: WeightTensor, row_start: int, columns: Range | None, rows: Range | None) -> None:
        """See `LinearMethod.load`."""
        row_end = self._place(weight, row_start, columns, rows)
        tensor = _cut(weight.read(self._ops.dtype, self._ops.device), columns, rows)
        if (row_start, row_end) == (0, self._shape.out_features) and tensor.is_contiguous():
            self.dense = tensor  # the whole layer at once: no second copy
        else:
            if self.dense is None:
                self.dense = self._empty(self._shape.out_features, self._shape.in_features)
            self.dense[row_start:row_end] = tensor
        self._loaded.append((row_start, row_end))

    def load_bias(self, bias: WeightTensor, row_start: int, rows: Range | None) -> None:
        """See `LinearMethod.load_bias`.

        Raises:
            CheckpointError: the layer has no bias, or the shape does not fit.
        """
        if not self._shape.has_bias:
            raise CheckpointError(f"{bias.where}: {self._shape.prefix} has no bias in this model's config")
        num_rows = bias.shape[0] if rows is None else rows[1] - rows[0]
        if len(bias.shape) != 1 or row_start + num_rows > self._shape.out_features:
            raise CheckpointError(
                f"{bias.where}: shape {list(bias.shape)} does not fit the bias of {self._shape.prefix}, which has "
                f"{self._shape.out_features - row_start} entries from {row_start} on"
            )
        if self.bias is None:
            self.bias = self._empty(self._shape.out_features)
        tensor = bias.read(self._ops.dtype, self._ops.device)
        self.bias[row_start : row_start + num_rows] = tensor if rows is None else tensor[rows[0] : rows[1]]
        self._bias_loaded.append((row_start, row_start + num_rows))

    def finish(self) -> None:
        """See `LinearMethod.finish`."""
        self._require(self._loaded, "weight")
        if self._shape.has_bias:
            self._require(self._bias_loaded, "bias")

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        assert self.dense is not None, "apply before finish"
        return self._ops.linear(x, self.dense, self.bias)

    @property
    def max_fused_rows(self) -> int:
        """See `LinearMethod.max_fused_rows`."""
        fused = self._ops.fused_linear
        return 0 if fused is None or fused.why_not(self._shape.in_features) is not None else fused.max_rows

    def apply_fused(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """See `LinearMethod.apply_fused`."""
        fused = self._ops.fused_linear
        assert fused is not None and self.dense is not None, "apply_fused beyond max_fused_rows"
        return fused(x, self.dense, self.bias, norm=norm, eps=eps, residual=residual, gated=gated)

    def _empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self._ops.dtype, device=self._ops.device)

    def _place(self, weight: WeightTensor, row_start: int, columns: Range | None, rows: Range | None) -> int:
        """The end of the rows that this part fills.

        Raises:
            CheckpointError: the part is not a matrix of the layer's width, or reaches past the layer's last row.
        """
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight.where}: shape {list(weight.shape)}, expected a matrix")
        num_rows = weight.shape[0] if rows is None else rows[1] - rows[0]
        num_columns = weight.shape[1] if columns is None else columns[1] - columns[0]
        room = self._shape.out_features - row_start
        if num_columns != self._shape.in_features or num_rows > room:
            raise CheckpointError(
                f"{weight.where}: a part [{num_rows}, {num_columns}] does not fit {self._shape.prefix}, which expects "
                f"{self._shape.in_features} columns and at most {room} rows from row {row_start} on"
            )
        return row_start + num_rows

    def _require(self, loaded: list[Range], what: str) -> None:
        reached = 0
        for start, end in sorted(loaded):
            if start > reached:
                break
            reached = max(reached, end)
        if reached != self._shape.out_features:
            raise CheckpointError(
                f"{self._shape.prefix}: rows from {reached} on of its {what} ({self._shape.out_features} rows) "
                "were not in the checkpoint"
            )


class Unquantized:
    """Satisfies `Scheme`: every linear is a `DenseMethod`.

    Args:
        expert_format: how experts are kept, as the checkpoint has them.
    """

    name = "unquantized"
    quantizes = False

    def __init__(self, ops: Ops, reason: str, expert_format: Literal["dense", "mxfp4"] = "dense") -> None:
        self._ops = ops
        self.reason = reason
        self.expert_format: Literal["dense", "mxfp4", "fp8_block"] = expert_format
        if expert_format == "mxfp4":
            self.name = "mxfp4"

    def declare(self, shape: LinearShape) -> DenseMethod:
        """See `Scheme.declare`."""
        return DenseMethod(shape, self._ops)


def _cut(tensor: torch.Tensor, columns: Range | None, rows: Range | None) -> torch.Tensor:
    if rows is not None:
        tensor = tensor[rows[0] : rows[1]]
    if columns is not None:
        tensor = tensor[:, columns[0] : columns[1]]
    return tensor
