"""Random expert layers and routings for benchmarks of expert kernels."""

from __future__ import annotations

import torch

from tokenspeed.moe.interface import ExpertWeights, MoeNeed, Routing

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
