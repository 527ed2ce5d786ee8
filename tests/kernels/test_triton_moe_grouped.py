"""Grouping of pairs, tensor-core experts and the op `experts` against plain torch in float64.

On a GPU in bfloat16 and also at the shapes of GPT-OSS and Qwen3 MoE; elsewhere the same code in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton.moe_align import MAX_SMALL_PAIRS, group_pairs
from tokenspeed.kernels.triton.moe_grouped import (
    ExpertMatrix,
    GroupedTile,
    combine,
    expert_matrix,
    grouped_down,
    grouped_gate_up,
)
from tokenspeed.kernels.triton.moe_mxfp4 import pack_mxfp4
from tokenspeed.moe.interface import Activation, ExpertFormat
from tokenspeed.protocol.errors import CheckpointError

BOUND = 1e-2 if torch.bfloat16 == KIND else 4e-6
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SWIGLU, CLAMPED = Activation(), Activation(limit=7.0, alpha=1.702)
FORMATS: tuple[ExpertFormat, ...] = ("dense", "mxfp4", "fp8_block")


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth).norm() / truth.norm().clamp(min=1e-30))


# ---- grouping -------------------------------------------------------------------------------------------------------


def ids_like(num_tokens: int, top_k: int, num_experts: int, how: str) -> torch.Tensor:
    if how == "one":
        return torch.full((num_tokens, top_k), num_experts - 1, dtype=torch.int32, device=DEVICE)
    if how == "few":
        return torch.randint(0, max(1, num_experts // 4), (num_tokens, top_k), dtype=torch.int32, device=DEVICE)
    return torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k, dim=1).indices.to(torch.int32)


@pytest.mark.parametrize("how", ["any", "few", "one"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [
        (1, 4, 32, 16),
        (1, 1, 1, 16),
        (5, 8, 128, 16),
        (40, 4, 32, 16),
        (128, 4, 32, 64),
        (129, 4, 7, 16),
        (300, 8, 20, 32),
    ],
)
def test_pairs_are_grouped(num_tokens: int, top_k: int, num_experts: int, block_m: int, how: str) -> None:
    """Stable by expert, every pair in one tile of its expert, both paths."""
    ids = ids_like(num_tokens, top_k, num_experts, how)
    grouping = group_pairs(ids, num_experts, block_m, pdl=ON_GPU)
    flat = ids.flatten().long().cpu()
    assert grouping.pairs.long().cpu().tolist() == torch.sort(flat, stable=True).indices.tolist()
    place = 0
    tiles = grouping.tiles.cpu().t().tolist()
    used = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[len(used) :] == [[-1, 0, 0]] * (len(tiles) - len(used))
    for expert, first, end in used:
        assert first == place
        assert first < end <= first + block_m
        assert (flat[grouping.pairs[first:end].long().cpu()] == expert).all()
        place = end
    assert place == flat.numel()
    assert len(used) == sum(-(-int(count) // block_m) for count in flat.bincount())


def test_both_paths_of_grouping_are_tested() -> None:
    assert 128 * 4 == MAX_SMALL_PAIRS < 129 * 4


# ---- weights --------------------------------------------------------------------------------------------------------


def matrix_and_truth(
    format: ExpertFormat, num_experts: int, num_rows: int, width: int, is_up: bool, has_bias: bool
) -> tuple[ExpertMatrix, torch.Tensor, torch.Tensor]:
    """A packed matrix [E, N, K], and its values and bias in float64."""
    bias = torch.randn(num_experts, num_rows, device=DEVICE).to(KIND) if has_bias else None
    wide_bias = torch.zeros(num_experts, num_rows, device=DEVICE).double() if bias is None else bias.double()
    if format == "dense":
        weight = (torch.randn(num_experts, num_rows, width, device=DEVICE) * width**-0.5).to(KIND)
        return expert_matrix(format, weight, None, bias), weight.double(), wide_bias
    if format == "mxfp4":
        codes = torch.randint(0, 256, (num_experts, num_rows, width // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(118, 125, (num_experts, num_rows, width // 32), dtype=torch.uint8, device=DEVICE)
        truth = mxfp4_values(codes, scales)
        return expert_matrix(format, pack_mxfp4(codes.clone(), scales, "gate_up"), None, bias), truth, wide_bias
    weight = torch.randn(num_experts, num_rows, width, device=DEVICE).to(torch.float8_e4m3fn)
    half_rows = num_rows // 2 if is_up else num_rows
    row_blocks, column_blocks = -(-half_rows // 128), -(-width // 128)
    scale = torch.rand(num_experts, row_blocks * (2 if is_up else 1), column_blocks, device=DEVICE) * 0.1 + 0.01
    wide = scale.double().repeat_interleave(128, 2)[:, :, :width]
    parts = wide.split(row_blocks, dim=1)
    rows = [part.repeat_interleave(128, 1)[:, :half_rows] for part in parts]
    wide = torch.stack(rows, dim=2).flatten(1, 2) if is_up else rows[0]
    return expert_matrix(format, weight, scale, bias), weight.double() * wide, wide_bias


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return E2M1.to(codes.device)[nibbles] * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def test_packed_mxfp4_is_exact() -> None:
    """Every code with every scale, by bits, as the kernel's plain arithmetic does it."""
    scales = torch.arange(0, 129, dtype=torch.uint8).view(1, 129, 1).repeat(1, 1, 5)
    codes = torch.arange(0, 80, dtype=torch.uint8).mul(37).expand(1, 129, 80).contiguous()
    truth = mxfp4_values(codes, scales)
    packed = pack_mxfp4(codes, scales, "w")
    w = packed.codes.view(torch.int16).view(1, 129, 5, 8).int()
    last = ((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040)
    slots = torch.stack((w & 0x81C0, (w << 3) & 0x81C0, (w << 6) & 0x81C0, last), dim=3)
    exponents = packed.scales.transpose(1, 2).contiguous().view(torch.uint8).view(1, 129, -1)[:, :, :5].int()
    factor = (exponents << 7).to(torch.int16).view(torch.bfloat16)
    values = slots.to(torch.int16).view(torch.bfloat16) * factor[..., None, None]
    assert torch.equal(values.double().flatten(2), truth)


def test_scales_that_are_too_large_are_refused() -> None:
    codes = torch.zeros(1, 2, 32, dtype=torch.uint8)
    scales = torch.full((1, 2, 2), 200, dtype=torch.uint8)
    pack_mxfp4(codes.clone(), scales, "w")  # over zeros they do not matter
    codes[0, 1, 20] = 3
    with pytest.raises(CheckpointError, match=r"w: an MXFP4 scale of 200 \(2\^73\).*128"):
        pack_mxfp4(codes, scales, "w")


# ---- the two products and the sum -----------------------------------------------------------------------------------


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


def run_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: ExpertMatrix, down: ExpertMatrix,
    activation: Activation, residual: torch.Tensor | None, block_m: int, tile: GroupedTile, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    grouping = group_pairs(ids, num_experts, block_m, pdl=ON_GPU)
    h = grouped_gate_up(x, up, grouping, ids.shape[1], activation, tile, pdl=ON_GPU)
    parts = grouped_down(h, down, grouping, weights, torch.float32, tile, pdl=ON_GPU)
    return combine(parts, x.shape[0], ids.shape[1], residual, x.dtype, pdl=ON_GPU)


TILES = {
    "small": (16, GroupedTile(64, 64, 1, 3, 4)),
    "split": (16, GroupedTile(128, 128, 2, 3, 4, 2, "dots", 2)),
    "large": (64, GroupedTile(128, 64, 1, 3, 8, 4)),
}


@pytest.mark.parametrize("tile_name", TILES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("activation", "has_bias"), [(SWIGLU, False), (CLAMPED, True)], ids=["silu", "clamped"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "inner", "how"),
    [(1, 1, 1, 64, 32, "any"), (3, 4, 6, 96, 96, "any"), (9, 2, 4, 160, 224, "one"), (21, 3, 5, 288, 64, "few")],
)
def test_grouped_experts(
    num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int, how: str,
    activation: Activation, has_bias: bool, format: ExpertFormat, tile_name: str,
) -> None:  # fmt: skip
    block_m, tile = TILES[tile_name]
    up, *up_truth = matrix_and_truth(format, num_experts, 2 * inner, hidden, True, has_bias)
    down, *down_truth = matrix_and_truth(format, num_experts, hidden, inner, False, has_bias)
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(KIND)
    residual = torch.randn(num_tokens, hidden, device=DEVICE).to(KIND) if has_bias else None
    ids = ids_like(num_tokens, top_k, num_experts, how)
    weights = torch.rand(num_tokens, top_k, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), activation, residual)
    out = run_grouped(x, ids, weights, up, down, activation, residual, block_m, tile, num_experts)
    assert residual is None or out is residual
    assert error(out, truth) < BOUND
