"""e4m3 weights: an fp8 checkpoint's own, or made of a dense checkpoint while it loads (`--quantization fp8`).

A layer keeps its bytes and one float32 scale an output row (checkpoints with 128 x 128 blocks: one a block) for the
`fp8_linear` op. It is dense in the model's dtype where that op is missing (CPU) or refuses its shape, where a part of a
merged layer came unquantized, and where a block of scales would be cut. The token table is always dense.

Activations: few rows are not quantized, many with one scale a token found at run time. So a checkpoint's static
`input_scale` is not needed; a scale a token is at least as exact.
"""

from __future__ import annotations

from typing import Literal

import torch

from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.kernels.ops import Fp8Linear, Ops
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, Fp8Source, Fp8Tensor, quantize
from tokenspeed.quantization.interface import LinearShape, WeightTensor
from tokenspeed.quantization.unquantized import DenseMethod, Range

TOKEN_TABLE = "model.embed_tokens"


class Fp8Method(DenseMethod):
    """One weight in e4m3; `dense` is set instead where the module's rules above say so.

    Args:
        linear: the op, or None to be dense.
        quantizes: make e4m3 of what is loaded, by row.
    """

    def __init__(self, shape: LinearShape, ops: Ops, linear: Fp8Linear | None, quantizes: bool) -> None:
        super().__init__(shape, ops)
        self._linear = linear
        self._quantizes = quantizes
        self._kept: Fp8Tensor | None = None

    def load(self, weight: WeightTensor, row_start: int, columns: Range | None, rows: Range | None) -> None:
        """See `LinearMethod.load`."""
        row_end = self._place(weight, row_start, columns, rows)
        if isinstance(weight, Fp8Source):
            whole = weight.fp8(self._ops.device)
        elif self._quantizes:
            whole = quantize(weight.read(self._ops.dtype, self._ops.device))
        else:
            self._widen()
            super().load(weight, row_start, columns, rows)
            return
        part = whole.cut(columns, rows)
        if part is not None and self._keeps(part, row_start, row_end):
            self._keep(part, row_start, row_end)
        else:
            self._widen()
            dense = whole.dequantize(self._ops.dtype) if part is None else part.dequantize(self._ops.dtype)
            if part is None:
                dense = dense[slice(*(rows or (None,))), slice(*(columns or (None,)))]
            if self.dense is None:
                self.dense = self._empty(self._shape.out_features, self._shape.in_features)
            self.dense[row_start:row_end] = dense
        self._loaded.append((row_start, row_end))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        if self._kept is None:
            return super().apply(x)
        assert self._linear is not None
        return self._linear(x, self._kept.weight, self._kept.scale, self.bias)

    @property
    def max_fused_rows(self) -> int:
        """See `LinearMethod.max_fused_rows`."""
        if self._kept is None:
            return super().max_fused_rows
        assert self._linear is not None
        return self._linear.max_fused_rows

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
        if self._kept is None:
            return super().apply_fused(x, norm=norm, eps=eps, residual=residual, gated=gated)
        assert self._linear is not None
        weight, scale = self._kept.weight, self._kept.scale
        return self._linear(x, weight, scale, self.bias, norm=norm, eps=eps, residual=residual, gated=gated)

    def _keeps(self, part: Fp8Tensor, row_start: int, row_end: int) -> bool:
        """The part can stay in e4m3, next to those that are there."""
        shape = self._shape
        if self._linear is None or self.dense is not None:
            return False
        if self._linear.why_not(shape.in_features, shape.out_features, part.is_block) is not None:
            return False
        if self._kept is not None and self._kept.is_block != part.is_block:
            return False
        return not part.is_block or not (row_start % BLOCK or (row_end % BLOCK and row_end != shape.out_features))

    def _keep(self, part: Fp8Tensor, row_start: int, row_end: int) -> None:
        device, (rows, width) = self._ops.device, (self._shape.out_features, self._shape.in_features)
        if self._kept is None:
            sizes = (-(-rows // BLOCK), -(-width // BLOCK)) if part.is_block else (rows,)
            self._kept = Fp8Tensor(
                torch.empty(rows, width, dtype=E4M3, device=device),
                torch.empty(sizes, dtype=torch.float32, device=device),
            )
        self._kept.weight[row_start:row_end] = part.weight
        first = row_start // BLOCK if part.is_block else row_start
        self._kept.scale[first : first + part.scale.shape[0]] = part.scale

    def _widen(self) -> None:
        """Become dense, with what is there already."""
        if self._kept is not None:
            self.dense = self._kept.dequantize(self._ops.dtype)
            self._kept = None


class Fp8:
    """Satisfies `Scheme`.

    Args:
        config: of the checkpoint, or None to quantize a dense one: linears of the layers only, the head stays dense.
    """

    name = "fp8"

    def __init__(self, ops: Ops, config: QuantizationConfig | None) -> None:
        self._ops = ops
        self._config = config
        self.quantizes = config is None
        has_blocks = config is None or config.granularity == "block"
        # Experts whose scales go by channel or tensor are widened: expert kernels know scales by block.
        self.expert_format: Literal["dense", "mxfp4", "fp8_block"] = "fp8_block" if has_blocks else "dense"
        dtype = str(ops.dtype).removeprefix("torch.")
        came = "made from dense weights, by output row" if config is None else config.described
        if ops.fp8_linear is None:
            does = f"dequantized to {dtype}: no kernel keeps them on {ops.device} in {dtype}"
        else:
            does = f"kept; above {ops.fp8_linear.max_fused_rows} rows activations are e4m3 too, with a scale a token"
            if config is not None and config.granularity == "block":
                does = f"kept; above {ops.fp8_linear.max_fused_rows} rows they are widened to {dtype} in each step"
        self.reason = f"e4m3 weights, {came}; {does}"

    def declare(self, shape: LinearShape) -> DenseMethod:
        """See `Scheme.declare`."""
        if self._is_dense(shape.prefix):
            return DenseMethod(shape, self._ops)
        return Fp8Method(shape, self._ops, self._ops.fp8_linear, self._config is None)

    def _is_dense(self, prefix: str) -> bool:
        if self._config is None:
            return not prefix.startswith("model.layers.")
        return prefix == TOKEN_TABLE or self._config.is_ignored(prefix)
