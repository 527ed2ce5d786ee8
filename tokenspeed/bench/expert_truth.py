"""Layers of our expert kernels that know what plain torch makes of their weights: for the tuner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.bench.expert_inputs import random_weights
from tokenspeed.kernels.triton.moe_align import Grouping
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix
from tokenspeed.moe.interface import ExpertWeights, MoeNeed, Routing

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One packed layer of our kernels. `weights`: its stored form, of the first layer only: the others' is taken."""

    experts: TritonExperts
    weights: ExpertWeights | None

    @property
    def gate_up(self) -> ExpertMatrix:
        return self.experts.gate_up

    @property
    def down(self) -> ExpertMatrix:
        return self.experts.down

    def hidden_truth(self, x: torch.Tensor, routing: Routing, grouping: Grouping, need: MoeNeed) -> torch.Tensor:
        """h [P, I] float32 by place, from the stored form."""
        pairs = grouping.pairs.long()
        ids = routing.expert_ids.flatten()[pairs].long()
        rows = x[pairs // need.top_k]
        both = self._products(rows, ids, is_up=True)
        gate, up = both[:, 0::2], both[:, 1::2]
        if need.activation.limit is None:
            return gate * torch.sigmoid(gate) * up
        gate = gate.clamp(max=need.activation.limit)
        up = up.clamp(-need.activation.limit, need.activation.limit)
        return gate * torch.sigmoid(need.activation.alpha * gate) * (up + 1)

    def part_truth(self, h: torch.Tensor, routing: Routing, grouping: Grouping) -> torch.Tensor:
        """What every pair adds, [P, H] float32 by pair."""
        pairs = grouping.pairs.long()
        parts = self._products(h, routing.expert_ids.flatten()[pairs].long(), is_up=False)
        out = torch.empty_like(parts)
        out[pairs] = parts * routing.weights.flatten()[pairs, None]
        return out

    def _products(self, rows: torch.Tensor, ids: torch.Tensor, is_up: bool) -> torch.Tensor:
        """Row by expert, whose rows lie together."""
        assert self.weights is not None, "only the first layer keeps its stored form"
        bias = self.weights.gate_up_bias if is_up else self.weights.down_bias
        out: list[torch.Tensor] = []
        first = 0
        for expert, count in enumerate(ids.bincount(minlength=len(self.weights.down)).tolist()):
            mine, first = rows[first : first + count], first + count
            if count:
                product = (mine @ dequantized(self.weights, expert, is_up, rows.dtype).t()).float()
                out.append(product if bias is None else product + bias[expert].float())
        return torch.cat(out)


def dequantized(weights: ExpertWeights, expert: int, is_up: bool, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix [N, K] in `dtype`."""
    stored = (weights.gate_up if is_up else weights.down)[expert]
    scales = weights.gate_up_scale if is_up else weights.down_scale
    if scales is None:
        return stored
    scale = scales[expert]
    if weights.format == "mxfp4":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=stored.device)
        wide = values[torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).long()]
        return (wide * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)).to(dtype)
    num_rows, width = stored.shape
    parts = scale.chunk(2) if is_up else (scale,)
    rows = num_rows // len(parts)
    by_row = [part.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width] for part in parts]
    return (stored.float() * torch.stack(by_row, dim=1).flatten(0, 1)).to(dtype)


def make_layers(need: MoeNeed, kernels: TritonExpertKernels, count: int, device: torch.device) -> list[ExpertLayer]:
    """Layers of distinct weights; the first keeps a copy of its stored form."""
    layers: list[ExpertLayer] = []
    for place in range(count):
        weights = random_weights(need, device)
        kept = None
        if place == 0:
            kept = ExpertWeights(
                need.format, weights.gate_up.clone(), weights.down.clone(), weights.gate_up_scale, weights.down_scale,
                weights.gate_up_bias, weights.down_bias,
            )  # fmt: skip
        layers.append(ExpertLayer(kernels.pack(weights, need), kept))
    return layers
