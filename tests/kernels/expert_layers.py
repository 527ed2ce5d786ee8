"""Expert layers for tests of Triton's expert kernels: random ones, what float64 makes of them, and ours."""

from __future__ import annotations

import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, expert_matrix
from tokenspeed.kernels.triton.moe_mxfp4 import pack_mxfp4
from tokenspeed.kernels.triton.moe_mxfp4_mma import why_no_mma
from tokenspeed.moe.interface import Activation, ExpertFormat, ExpertWeights, MoeNeed

HOPPER = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
NO_MMA = why_no_mma(torch.cuda.get_device_capability()) if ON_GPU else "there is no GPU"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SWIGLU, CLAMPED = Activation(), Activation(limit=7.0, alpha=1.702)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def ids_like(num_tokens: int, top_k: int, num_experts: int, how: str) -> torch.Tensor:
    if how == "one":
        return torch.full((num_tokens, top_k), num_experts - 1, dtype=torch.int32, device=DEVICE)
    if how == "few":
        return torch.randint(0, max(1, num_experts // 4), (num_tokens, top_k), dtype=torch.int32, device=DEVICE)
    return torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k, dim=1).indices.to(torch.int32)


def matrix_and_truth(
    format: ExpertFormat, num_experts: int, num_rows: int, width: int, is_up: bool, has_bias: bool
) -> tuple[ExpertMatrix, torch.Tensor, torch.Tensor]:
    """A packed matrix [E, N, K], and its values and bias in float64."""
    weight, scale, bias, truth, wide_bias = stored(format, num_experts, num_rows, width, is_up, has_bias)
    if format == "mxfp4":
        assert scale is not None
        return expert_matrix(format, pack_mxfp4(weight, scale, "gate_up"), None, bias), truth, wide_bias
    return expert_matrix(format, weight, scale, bias), truth, wide_bias


def stored(
    format: ExpertFormat, num_experts: int, num_rows: int, width: int, is_up: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """One matrix as `ExpertWeights` has it: weight, scale, bias; its values and bias in float64."""
    bias = torch.randn(num_experts, num_rows, device=DEVICE).to(KIND) if has_bias else None
    wide_bias = torch.zeros(num_experts, num_rows, device=DEVICE).double() if bias is None else bias.double()
    if format == "dense":
        weight = (torch.randn(num_experts, num_rows, width, device=DEVICE) * width**-0.5).to(KIND)
        return weight, None, bias, weight.double(), wide_bias
    if format == "mxfp4":
        codes = torch.randint(0, 256, (num_experts, num_rows, width // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(118, 125, (num_experts, num_rows, width // 32), dtype=torch.uint8, device=DEVICE)
        return codes, scales, bias, mxfp4_values(codes, scales), wide_bias
    weight = torch.randn(num_experts, num_rows, width, device=DEVICE).to(torch.float8_e4m3fn)
    half_rows = num_rows // 2 if is_up else num_rows
    row_blocks, column_blocks = -(-half_rows // 128), -(-width // 128)
    scale = torch.rand(num_experts, row_blocks * (2 if is_up else 1), column_blocks, device=DEVICE) * 0.1 + 0.01
    wide = scale.double().repeat_interleave(128, 2)[:, :, :width]
    parts = wide.split(row_blocks, dim=1)
    rows = [part.repeat_interleave(128, 1)[:, :half_rows] for part in parts]
    wide = torch.stack(rows, dim=2).flatten(1, 2) if is_up else rows[0]
    return weight, scale, bias, weight.double() * wide, wide_bias


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return E2M1.to(codes.device)[nibbles] * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def truth_of(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor], activation: Activation, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if residual is None else residual.double()
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            both = up[0][e] @ x[t].double() + up[1][e]
            gate, upper = both[0::2], both[1::2]
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                upper = upper.clamp(-activation.limit, activation.limit) + 1
            h = gate * torch.sigmoid(gate * (activation.alpha if activation.limit is not None else 1.0)) * upper
            out[t] += weights[t, j].double() * (down[0][e] @ h + down[1][e])
    return out


def dense_truth(
    x: torch.Tensor, ids: torch.Tensor, up: tuple[torch.Tensor, torch.Tensor], activation: Activation
) -> torch.Tensor:
    """h float64 [T, k, I]."""
    num_tokens, top_k = ids.shape
    h = torch.zeros(num_tokens, top_k, up[1].shape[1] // 2, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        both = x[token].double() @ up[0][expert].T + up[1][expert]
        gate, upper = both[:, 0::2], both[:, 1::2]
        alpha = 1.0
        if activation.limit is not None:
            alpha = activation.alpha
            gate = gate.clamp(max=activation.limit)
            upper = upper.clamp(-activation.limit, activation.limit) + 1
        h[token, place] = gate * torch.sigmoid(alpha * gate) * upper
    return h


def summed_truth(
    h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, down: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    out = torch.zeros(h.shape[0], down[1].shape[1], dtype=torch.float64, device=h.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        y = h[token, place] @ down[0][expert].T + down[1][expert]
        out.index_add_(0, token, weights[token, place].double()[:, None] * y)
    return out


def kernels() -> TritonExpertKernels:
    return TritonExpertKernels(DEVICE, HOPPER, None, 227 * 1024, "a GPU without a table", NO_MMA)


def layer(
    format: ExpertFormat, need: MoeNeed, has_bias: bool, ours: TritonExpertKernels | None = None
) -> tuple[TritonExperts, list[torch.Tensor], list[torch.Tensor]]:
    """A packed layer, and values and bias of its two matrices."""
    e, h, i = need.num_experts, need.hidden_size, need.intermediate_size
    up, up_scale, up_bias, *up_truth = stored(format, e, 2 * i, h, True, has_bias)
    down, down_scale, down_bias, *down_truth = stored(format, e, h, i, False, has_bias)
    weights = ExpertWeights(format, up, down, up_scale, down_scale, up_bias, down_bias)
    return (ours or kernels()).pack(weights, need), up_truth, down_truth


def need_of(format: ExpertFormat, e: int, k: int, h: int, i: int, has_bias: bool, activation: Activation) -> MoeNeed:
    return MoeNeed(DEVICE.type, KIND, e, k, h, i, format, has_bias, activation)
