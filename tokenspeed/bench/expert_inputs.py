"""Random expert layers and routings for benchmarks of the expert kernels, and what plain torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.kernels.ops import ExpertKernels
from tokenspeed.kernels.triton.moe_align import Grouping
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix
from tokenspeed.moe.interface import Experts, ExpertWeights, MoeNeed, Routing

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALES = (119, 122)
"""Half-open range of MXFP4 scales: with these a matrix of a few thousand columns keeps x's size about."""


def random_weights(need: MoeNeed, device: torch.device) -> ExpertWeights:
    """Weights of one layer in their stored form."""
    e, h, i = need.num_experts, need.hidden_size, need.intermediate_size
    shapes = ((2 * i, h), (h, i))
    biases = [
        torch.randn(e, rows, device=device).to(need.dtype) if need.has_bias else None for rows, _ in shapes
    ]  # fmt: skip
    if need.format == "mxfp4":
        codes = [torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8, device=device) for n, k in shapes]
        scales = [torch.randint(*SCALES, (e, n, k // 32), dtype=torch.uint8, device=device) for n, k in shapes]
        return ExpertWeights(need.format, codes[0], codes[1], scales[0], scales[1], biases[0], biases[1])
    dense = [torch.randn(e, n, k, device=device, dtype=need.dtype) for n, k in shapes]
    if need.format == "dense":
        for matrix in dense:
            matrix.mul_(matrix.shape[2] ** -0.5)
        return ExpertWeights(need.format, dense[0], dense[1], None, None, biases[0], biases[1])
    kept = [matrix.to(torch.float8_e4m3fn) for matrix in dense]
    blocks = ((2 * -(-i // 128), -(-h // 128)), (-(-h // 128), -(-i // 128)))
    factors = [torch.rand(e, *size, device=device) * (64 * size[1]) ** -0.5 for size in blocks]
    return ExpertWeights(need.format, kept[0], kept[1], factors[0], factors[1], biases[0], biases[1])


def random_routing(need: MoeNeed, num_tokens: int, device: torch.device) -> Routing:
    """Every set of experts equally likely."""
    scores = torch.rand(num_tokens, need.num_experts, device=device)
    ids = scores.topk(need.top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, need.top_k, device=device)
    return Routing(ids, weights / weights.sum(1, keepdim=True))


def pack_layers(need: MoeNeed, kernels: ExpertKernels, count: int, device: torch.device) -> list[Experts]:
    """Layers of distinct weights, packed by an implementation."""
    return [kernels.pack(random_weights(need, device), need) for _ in range(count)]


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
