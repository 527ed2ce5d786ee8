"""How a linear layer's weight is stored and multiplied.

A scheme makes one `LinearMethod` a layer. The layer tells it where each checkpoint tensor goes (rows of the merged
weight); the scheme decides in what form to keep it. `finish` repacks once; after it `apply` may be called from any
thread and under graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A (merged, sharded) linear: y[T, out_features] = x[T, in_features] @ W.T + bias.

    `prefix` is the layer's name in the checkpoint's (HF) spelling, for errors and for per-layer exceptions.
    """

    in_features: int
    out_features: int
    has_bias: bool
    prefix: str


class WeightTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet.

    Fields:
        name: HF spelling (`model.layers.0.self_attn.q_proj.weight`), whatever the file calls it.
        where: file and tensor name, for errors.
        shape: logical shape (dequantized), HF order [out_features, in_features].
        qtype: GGUF type name (`Q4_1`, `Q8_0`, ...) when the bytes are block-quantized along the last axis, else None.
    """

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def qtype(self) -> str | None: ...

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """The whole tensor, dequantized, in `dtype`, on `device`. A new tensor each call.

        On a GPU it is ready in order with the current stream. Weights stream there, read ahead in the order of the
        file: a load rule reads its tensor once, when it is called.
        """
        ...

    def raw(self) -> torch.Tensor:
        """Block-quantized bytes, uint8 [shape[0], bytes per row], rows already in HF order. Only when qtype is set."""
        ...


class LinearMethod(Protocol):
    """One layer's weight.

    Fields:
        dense: [out_features, in_features] in the model's dtype, when the method keeps such a copy (after `finish`); an
            embedding looks rows up in it, so that a tied head is stored once. None when it does not.
    """

    dense: torch.Tensor | None

    def load(
        self, weight: WeightTensor, row_start: int, columns: tuple[int, int] | None, rows: tuple[int, int] | None
    ) -> None:
        """Put `weight[rows, columns]` (half-open; None = all) at rows [row_start, ...) of the merged weight.

        Raises:
            CheckpointError: the shape does not fit. Names file, tensor and expectation.
        """
        ...

    def load_bias(self, bias: WeightTensor, row_start: int, rows: tuple[int, int] | None) -> None: ...

    def finish(self) -> None:
        """Repack for the kernels; free what is no longer needed.

        Raises:
            CheckpointError: a part of the weight was never loaded.
        """
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features], dtype of x."""
        ...

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which `apply_fused` serves; 0 = never."""
        ...

    def apply_fused(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """The linear with its neighbours in one launch: see `kernels.ops.FusedLinear`. T <= max_fused_rows."""
        ...


class Scheme(Protocol):
    """One quantization scheme.

    Fields:
        name: for the log and the command line.
        reason: why it was chosen and what it does with the weights, in words.
        expert_format: how the experts of sparse layers are kept; see `moe.interface.ExpertFormat`.
        quantizes: dense weights are quantized while they load.
    """

    name: str
    reason: str
    expert_format: Literal["dense", "mxfp4", "fp8_block"]
    quantizes: bool

    def declare(self, shape: LinearShape) -> LinearMethod:
        """A method for one layer; allocates nothing large before the first load."""
        ...
