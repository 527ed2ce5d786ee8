"""The truth for expert layers: router scores, top k, and every hit expert in turn, in float32.

    route    scores = x W^T + b;  softmax over all then top k, or top k then softmax over those
    experts  out[t] = sum over k of weight[t, k] * (act(x[t] gate_up[e]^T + b) down[e]^T + b),  e = ids[t, k]

A token's experts are summed in the order of their numbers, so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenspeed.kernels.reference.mxfp4 import dequantize
from tokenspeed.kernels.reference.pointwise import reference, rms_norm
from tokenspeed.moe.interface import Activation, ExpertWeights, MoeNeed, RouterRule, Routing

FP8_BLOCK = 128
ANY_ROWS = 1 << 30


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


def dense_expert(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [2 I, H], interleaved, and down [H, I] of one expert in `dtype`, rounded once from float32."""
    gate_up, down = weights.gate_up[expert], weights.down[expert]
    if weights.format == "dense":
        return gate_up.to(dtype), down.to(dtype)
    assert weights.gate_up_scale is not None and weights.down_scale is not None
    gate_up_scale, down_scale = weights.gate_up_scale[expert], weights.down_scale[expert]
    if weights.format == "mxfp4":
        return dequantize(gate_up, gate_up_scale, dtype), dequantize(down, down_scale, dtype)
    gate_scale, up_scale = gate_up_scale.chunk(2)
    wide = torch.empty(gate_up.shape, device=gate_up.device)
    wide[0::2] = gate_up[0::2].float() * _spread(gate_scale, gate_up[0::2])
    wide[1::2] = gate_up[1::2].float() * _spread(up_scale, gate_up[1::2])
    return wide.to(dtype), (down.float() * _spread(down_scale, down)).to(dtype)


def _spread(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Scales of 128 x 128 blocks, one for each element of the matrix."""
    rows, columns = matrix.shape
    return scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


class LoopedExperts:
    """One layer's experts, one after the other. Satisfies `Experts`.

    Args:
        dtype: what the two products of an expert are computed in; sums over experts are float32.
    """

    max_fused_rows = ANY_ROWS

    def __init__(self, weights: ExpertWeights, activation: Activation, dtype: torch.dtype) -> None:
        self._weights = weights
        self._activation = activation
        self._dtype = dtype

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
        weights, dtype = self._weights, self._dtype
        gate_up, down = dense_expert(weights, expert, dtype)
        gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
        inner = functional.linear(x, gate_up, None if gate_up_bias is None else gate_up_bias[expert].to(dtype))
        h = activate(inner.float(), self._activation).to(dtype)
        return functional.linear(h, down, None if down_bias is None else down_bias[expert].to(dtype))


class ReferenceExperts:
    """Satisfies `ops.ExpertKernels`."""

    def why_not(self, need: MoeNeed) -> str | None:
        """Never: the reference serves every need."""
        return None

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> LoopedExperts:
        """See `ops.ExpertKernels.pack`. Keeps the weights as they are."""
        return LoopedExperts(weights, need.activation, torch.float32)


IMPLEMENTATIONS = (reference("route", Router()), reference("experts", ReferenceExperts()))
