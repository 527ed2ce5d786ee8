"""The operations that models are written in, as types. `registry` picks an implementation of each for a device.

T tokens, H hidden size, D head_dim, Hq query heads, Hk key/value heads, V vocabulary. Activations are `dtype` (bfloat16
or float32), arithmetic is fp32 inside. An implementation may be recorded into a step graph: then it must write to the
tensors it was given or to buffers that live as long as the graph, and read lengths only from device tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.moe.interface import Experts, ExpertWeights, MoeNeed, RouterRule, Routing


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64, table [V, H] -> [T, H]."""
        ...


class RMSNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, H] -> x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019). New tensor."""
        ...


class AddRMSNorm(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place, then the norm of residual. x, residual [T, H]; returns a new [T, H]."""
        ...


class QKVRopeCache(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Split, optional per-head RMSNorm of q and k, NeoX rotary, write k and v to the pool.

        Args:
            qkv: [T, (Hq + 2 Hk) * D]: queries, keys, values; may be overwritten.
            positions: [T] int64, rows of cos_sin.
            cos_sin: [max_position, D] float32: cos for the first D/2 columns, sin for the rest. Rotary pairs are
                (i, i + D/2); y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
            keys, values: [num_pages, page_size, Hk, D], written at flat slot `slots[t]` = page * page_size + offset.
            slots: [T] int64.
            q_norm, k_norm: [D] weights, or None.
            k_scale, v_scale: a float8_e4m3fn pool holds key / k_scale and value / v_scale, cut off at 448; else 1.
        Returns:
            q: [T, Hq, D]; may be a view of qkv.
        """
        ...


class PagedAttention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        out_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention over paged keys and values: see `AttentionBackend.run`. Returns [T, Hq * D].

        Args:
            scale: factor on the logits, with that of an 8-bit pool's keys.
            out_scale: factor on the result: that of an 8-bit pool's values.
        """
        ...


class SiluAndMul(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]; gate is the first half of the columns."""
        ...


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in], weight [out, in] -> [T, out]."""
        ...


class BlockLinear(Protocol):
    """Linear over block-quantized weights (GGUF types), kept quantized: for the few rows of a decode step."""

    qtypes: frozenset[str]
    max_rows: int
    """Above this many rows a dense bf16 matmul is faster; the scheme then uses its dense copy."""

    def pack(self, raw: torch.Tensor, qtype: str, in_features: int) -> object:
        """raw uint8 [out, row_bytes] in GGUF block layout -> whatever `__call__` takes. `qtype` must be in `qtypes`."""
        ...

    def __call__(self, x: torch.Tensor, packed: object, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out], dtype of x. A row's result does not depend on the other rows."""
        ...


class FusedLinear(Protocol):
    """A linear for the few rows of a decode step that does its neighbours' work in the same launch."""

    max_rows: int

    def why_not(self, in_features: int) -> str | None:
        """None when a weight of this width can be served, otherwise the reason."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """x [T, in], T <= max_rows, weight [out, in] -> [T, out].

        Args:
            norm: [in], weight of an RMSNorm that x passes through first, with `eps`.
            residual: [T, out]; the result is added to it in place, and it is returned.
            gated: the weight's rows are [gate | up]; the result is silu(gate) * up, [T, out / 2].
        """
        ...


class Fp8Linear(Protocol):
    """Linear over weights kept in e4m3, one byte each."""

    max_fused_rows: int
    """Rows up to which `norm`, `residual` and `gated` may be asked for."""

    def why_not(self, in_features: int, out_features: int, is_block: bool) -> str | None:
        """None when a weight of this shape, with scales by row or by block, can be served, otherwise the reason."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """x [T, in], any T; weight float8_e4m3fn [out, in] -> [T, out], dtype of x.

        Args:
            scale: float32, [out] a row's, or [ceil(out / 128), in / 128] a block's: weight * scale is the dense weight.
            norm, eps, residual, gated: see `FusedLinear`; gated with block scales: out / 2 is a multiple of 128.
        """
        ...


class Route(Protocol):
    """The router of a mixture-of-experts layer: scores, top k and their weights."""

    max_fused_rows: int
    """Tokens up to which `norm` may be asked for."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rule: RouterRule,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[torch.Tensor, Routing]:
        """x [T, H], weight [E, H], bias [E] or None -> the (normed) x [T, H] and where each token goes.

        Scores are summed in float32 from inputs in the model's dtype.

        Args:
            norm: [H], weight of an RMSNorm that x passes through first, with `eps`.
        """
        ...


class ExpertKernels(Protocol):
    """The experts of a mixture-of-experts layer; `moe/` chooses among backends, this is the one of our own kernels."""

    def why_not(self, need: MoeNeed) -> str | None:
        """None when such experts can be served, otherwise the reason."""
        ...

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> Experts:
        """See `MoeBackend.pack`."""
        ...


class StepGraph(Protocol):
    """A recorded sequence of operations on fixed buffers."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records operations instead of dispatching them one by one: CUDA graphs, or a tape of native calls on a CPU."""

    def record(self) -> AbstractContextManager[StepGraph]:
        """Inside the block every op of these `Ops` is recorded (its result undefined); complete at exit.

        Raises:
            GraphUnsupported: on exit or at the call, when something cannot be recorded; the message names it.
        """
        ...


class GraphUnsupported(RuntimeError):
    """This forward cannot be recorded; run it eagerly."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The chosen implementation of every operation for one device and dtype; layers are built with it.

    `recorder` is None where steps cannot be recorded, `block_linear` where quantized weights cannot be kept,
    `fused_linear` where launches cost too little to fuse for, `fp8_linear` where e4m3 weights are
    dequantized, `route` and `experts` where no expert layer can be served. `kv_dtype` is that of the KV pool.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    embedding: Embedding
    rms_norm: RMSNorm
    add_rms_norm: AddRMSNorm
    qkv_rope_cache: QKVRopeCache
    paged_attention: PagedAttention
    silu_and_mul: SiluAndMul
    linear: Linear
    block_linear: BlockLinear | None
    recorder: Recorder | None
    fused_linear: FusedLinear | None = None
    fp8_linear: Fp8Linear | None = None
    route: Route | None = None
    experts: ExpertKernels | None = None
