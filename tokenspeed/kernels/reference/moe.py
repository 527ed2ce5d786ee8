"""The truth for expert layers: router scores, top k, and every hit expert in turn, in float32.

    route    scores = x W^T + b;  softmax over all then top k, or top k then softmax over those
    experts  out[t] = sum over k of weight[t, k] * (act(x[t] gate_up[e]^T + b) down[e]^T + b),  e = ids[t, k]

A token's experts are summed in the order of their numbers, so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tokenspeed.kernels.reference.mxfp4 import Widener
from tokenspeed.kernels.reference.pointwise import REFERENCE_RANK, never, reference, rms_norm
from tokenspeed.kernels.registry import Implementation
from tokenspeed.moe.interface import Activation, ExpertWeights, MoeNeed, RouterRule, Routing

FP8_BLOCK = 128
ANY_ROWS = 1 << 30
WIDENED_ROWS = 256
"""Rows of a quantized matrix that are numbers at once; whole blocks of interleaved gate and up."""


class Router:
    """Satisfies `ops.Route`."""

    max_fused_rows = ANY_ROWS

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
        """See `ops.Route.__call__`."""
        if norm is not None:
            x = rms_norm(x, norm, eps)
        scores = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return x, pick(scores, rule)


def pick(scores: torch.Tensor, rule: RouterRule) -> Routing:
    """scores [T, E] float32 -> the best k of each row, the lower number first where two are equal."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    expert_ids = order.indices[:, : rule.top_k]
    if rule.scoring == "topk_softmax":
        weights = order.values[:, : rule.top_k].softmax(-1)
    else:
        weights = scores.softmax(-1).gather(1, expert_ids)
        if rule.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return Routing(expert_ids.to(torch.int32), weights)


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up float32 [T, 2 I], interleaved -> h [T, I]; see `Activation`."""
    gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    if activation.limit is None:
        return functional.silu(gate) * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


class ExpertReader:
    """Matrices of experts as numbers, some rows at a time.

    Args:
        dtype: what they are widened to, rounded once from float32.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._widen = Widener(dtype, weights.gate_up.device) if weights.format == "mxfp4" else None

    def gate_up(self, expert: int, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of [2 I, H], interleaved; `first` a multiple of 256."""
        rows, scale = self._weights.gate_up[expert, first:last], self._weights.gate_up_scale
        if scale is None or self._widen is not None:
            return self._rows(rows, None if scale is None else scale[expert, first:last])
        wide = torch.empty(rows.shape, dtype=self._dtype, device=rows.device)
        for half, half_scale in enumerate(scale[expert].chunk(2)):
            mine = rows[half::2]
            wide[half::2] = (mine.float() * _spread(half_scale[first // 2 // FP8_BLOCK :], mine)).to(self._dtype)
        return wide

    def down(self, expert: int, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of [H, I]; `first` a multiple of 128."""
        rows, scale = self._weights.down[expert, first:last], self._weights.down_scale
        if scale is None or self._widen is not None:
            return self._rows(rows, None if scale is None else scale[expert, first:last])
        return (rows.float() * _spread(scale[expert, first // FP8_BLOCK :], rows)).to(self._dtype)

    def _rows(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return rows.to(self._dtype)
        assert self._widen is not None
        return self._widen(rows, scale)


def _spread(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Scales of 128 x 128 blocks, one for each element of the matrix."""
    rows, columns = matrix.shape
    blocks = scale[: -(-rows // FP8_BLOCK)]
    return blocks.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


class LoopedExperts:
    """One layer's experts, one after the other. Satisfies `Experts`.

    Quantized matrices are widened for the call, some rows at a time so that these stay in a core's cache.

    Args:
        dtype: what the two products of an expert are computed in; sums over experts are float32.
    """

    max_fused_rows = ANY_ROWS

    def __init__(self, weights: ExpertWeights, activation: Activation, dtype: torch.dtype) -> None:
        self._weights = weights
        self._activation = activation
        self._dtype = dtype
        self._reader = ExpertReader(weights, dtype)
        is_dense = weights.format == "dense"
        self._step = max(weights.gate_up.shape[1], weights.down.shape[1]) if is_dense else WIDENED_ROWS

    def __call__(self, x: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `Experts.__call__`. Waits for the device: which experts are hit is read on the host."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        given = x.to(self._dtype)
        for expert in routing.expert_ids.unique().tolist():
            rows, places = (routing.expert_ids == expert).nonzero(as_tuple=True)
            y = self._expert(given[rows], expert)
            out.index_add_(0, rows, y.float() * routing.weights[rows, places, None])
        if residual is None:
            return out.to(x.dtype)
        return residual.copy_(residual.float() + out)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        weights, reader = self._weights, self._reader
        inner = self._linear(x, expert, reader.gate_up, weights.gate_up.shape[1], weights.gate_up_bias)
        h = activate(inner.float(), self._activation).to(self._dtype)
        return self._linear(h, expert, reader.down, weights.down.shape[1], weights.down_bias)

    def _linear(
        self,
        x: torch.Tensor,
        expert: int,
        read: Callable[[int, int, int], torch.Tensor],
        num_rows: int,
        biases: torch.Tensor | None,
    ) -> torch.Tensor:
        bias = None if biases is None else biases[expert].to(self._dtype)
        parts = []
        for first in range(0, num_rows, self._step):
            last = min(first + self._step, num_rows)
            part = None if bias is None else bias[first:last]
            parts.append(functional.linear(x, read(expert, first, last), part))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class ReferenceExperts:
    """Satisfies `ops.ExpertKernels`."""

    def why_not(self, need: MoeNeed) -> str | None:
        """Never: the reference serves every need."""
        return None

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> LoopedExperts:
        """See `ops.ExpertKernels.pack`. Keeps the weights as they are."""
        return LoopedExperts(weights, need.activation, torch.float32)


IMPLEMENTATIONS = (
    reference("route", Router()),
    Implementation("experts", "reference", REFERENCE_RANK, never, lambda need: ReferenceExperts(), can_record=False),
)
