"""Triton's experts for few tokens against the reference in float32: in the interpreter at small shapes, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU, randn

from tokenspeed.kernels.reference.moe import LoopedExperts
from tokenspeed.kernels.reference.mxfp4 import dequantize
from tokenspeed.kernels.triton.moe_gemv import (
    PackedExperts,
    Tile,
    choose_tile,
    gemv_down,
    gemv_gate_up,
    make_workspace,
    pack_experts,
)
from tokenspeed.kernels.triton.moe_mxfp4 import pack_mxfp4
from tokenspeed.moe.interface import Activation, ExpertFormat, ExpertWeights, Routing

BOUND = 1e-2 if torch.bfloat16 == KIND else 2e-6
SILU, CLAMPED = Activation(), Activation(limit=1.5, alpha=1.702)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE)


def make_weights(format: ExpertFormat, sizes: tuple[int, int, int], has_bias: bool) -> ExpertWeights:
    """sizes: experts, hidden, intermediate."""
    num, hidden, inner = sizes
    biases = (randn(num, 2 * inner), randn(num, hidden)) if has_bias else (None, None)
    if format == "dense":
        gate_up, down = randn(num, 2 * inner, hidden) * 0.1, randn(num, hidden, inner) * 0.1
        return ExpertWeights(format, gate_up, down, None, None, *biases)
    return ExpertWeights(
        format,
        random_bytes(num, 2 * inner, hidden // 2),
        random_bytes(num, hidden, inner // 2),
        random_bytes(num, 2 * inner, hidden // 32, low=118, high=127),
        random_bytes(num, hidden, inner // 32, low=118, high=127),
        *biases,
    )


def make_routing(num_tokens: int, num_experts: int, top_k: int) -> Routing:
    ids = torch.stack([torch.randperm(num_experts, device=DEVICE)[:top_k] for _ in range(num_tokens)])
    return Routing(ids.to(torch.int32), torch.rand(num_tokens, top_k, device=DEVICE).softmax(-1))


def poisoned(*shape: int, dtype: torch.dtype = KIND) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def packed_copy(weights: ExpertWeights) -> PackedExperts:
    """MXFP4 is packed where it lies; the reference still needs it as it came."""
    return pack_experts(
        ExpertWeights(
            weights.format,
            weights.gate_up.clone(),
            weights.down.clone(),
            weights.gate_up_scale,
            weights.down_scale,
            weights.gate_up_bias,
            weights.down_bias,
        )
    )


def run(
    x: torch.Tensor,
    routing: Routing,
    packed: PackedExperts,
    activation: Activation,
    tiles: tuple[Tile | None, Tile | None] = (None, None),
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    h = poisoned(routing.expert_ids.numel(), packed.intermediate_size, dtype=torch.float32)
    gemv_gate_up(x, routing.expert_ids, packed, activation, h, tiles[0], ON_GPU)
    out = poisoned(*x.shape) if residual is None else residual
    workspace = make_workspace(DEVICE)
    workspace.partials.fill_(float("nan"))
    add = residual is not None
    y = gemv_down(h, routing.expert_ids, routing.weights, packed, out, workspace, add, tiles[1], ON_GPU)
    assert y is out
    assert not workspace.counters.any()
    return out


SHAPES = [(1, 96, 64, 1, 1), (7, 96, 64, 3, 4), (9, 64, 96, 2, 8)]
SHAPES += [(32, 2880, 2880, 2, 4), (16, 2048, 768, 2, 8)] if ON_GPU else []
"""experts, hidden, intermediate, tokens, top k."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("format", ["dense", "mxfp4"])
def test_equal_to_the_reference(
    shape: tuple[int, int, int, int, int], activation: Activation, format: ExpertFormat
) -> None:
    num_experts, hidden, inner, num_tokens, top_k = shape
    clamped = activation is CLAMPED  # with biases and a residual, as in GPT-OSS
    weights = make_weights(format, (num_experts, hidden, inner), clamped)
    x, routing = randn(num_tokens, hidden), make_routing(num_tokens, num_experts, top_k)
    residual = randn(num_tokens, hidden) if clamped else None
    wide = None if residual is None else residual.float()
    truth = LoopedExperts(weights, activation, torch.float32)(x.float(), routing, wide)
    # Few programs in the interpreter, the chosen tiles on a GPU.
    tiles = (None, None) if ON_GPU else (Tile(64, 64, 4), Tile(64, 64, 4, 1 + clamped))
    assert error(run(x, routing, packed_copy(weights), activation, tiles, residual), truth) < BOUND


def test_widths_that_are_not_powers_of_two() -> None:
    weights = make_weights("dense", (5, 96, 48), True)
    x, routing = randn(2, 96), make_routing(2, 5, 3)
    truth = LoopedExperts(weights, CLAMPED, torch.float32)(x.float(), routing)
    tiles = Tile(4, 64, 4), Tile(16, 32, 4, 4)
    assert error(run(x, routing, packed_copy(weights), CLAMPED, tiles), truth) < BOUND


@pytest.mark.parametrize(
    "tiles",
    [
        (Tile(16, 32, 1), Tile(32, 32, 1)),
        (Tile(32, 64, 4), Tile(64, 64, 4, 2)),
        (Tile(64, 128, 4), Tile(16, 64, 4, 3)),
        (Tile(16, 256, 4), Tile(16, 32, 4, 8)),  # more programs than steps
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["dense", "mxfp4"])
def test_every_kind_of_tile(format: ExpertFormat, tiles: tuple[Tile, Tile]) -> None:
    weights = make_weights(format, (3, 96, 64), True)
    x, routing = randn(2, 96), make_routing(2, 3, 2)
    truth = LoopedExperts(weights, CLAMPED, torch.float32)(x.float(), routing)
    assert error(run(x, routing, packed_copy(weights), CLAMPED, tiles), truth) < BOUND


def test_tokens_that_share_experts() -> None:
    """A row's result does not depend on the other rows: bit for bit."""
    weights = packed_copy(make_weights("mxfp4", (4, 64, 64), True))
    x, routing = randn(3, 64), make_routing(3, 4, 4)
    tiles = Tile(64, 64, 4), Tile(64, 64, 4)
    together = run(x, routing, weights, CLAMPED, tiles)
    for token in range(3):
        row = slice(token, token + 1)
        alone = Routing(routing.expert_ids[row].contiguous(), routing.weights[row].contiguous())
        assert torch.equal(run(x[row].contiguous(), alone, weights, CLAMPED, tiles), together[row])


def test_the_clamp_acts() -> None:
    """With large inputs nearly every gate and up is at its limit."""
    weights = make_weights("dense", (2, 64, 32), True)
    x, routing = randn(1, 64) * 100, make_routing(1, 2, 2)
    h = gemv_gate_up(x, routing.expert_ids, packed_copy(weights), CLAMPED, pdl=ON_GPU)
    assert float(h.abs().max()) <= 1.5 * 2.5
    assert float(h.max()) > 3.4


def test_all_codes_of_mxfp4_come_back() -> None:
    """Every pair of nibbles at every place of a word: against unit vectors, the down kernel gives the weights."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(4)  # 1024 bytes: 2048 values, 64 rows of 32
    for turn in range(4):
        down = blocks.roll(turn * 5).view(1, 64, 16).to(DEVICE)
        scale = torch.full((1, 64, 1), 127, dtype=torch.uint8, device=DEVICE)
        truth = dequantize(down, scale, torch.float32)[0]
        unused = torch.zeros(1, 64, 8, dtype=torch.int32, device=DEVICE)
        weight = pack_mxfp4(down.clone(), scale, "down")
        packed = PackedExperts("mxfp4", unused, weight.codes, None, weight.scales, None, None)
        ids = torch.zeros(32, 1, dtype=torch.int32, device=DEVICE)
        ones = torch.ones(32, 1, device=DEVICE)
        out = poisoned(32, 64, dtype=torch.float32)
        gemv_down(
            torch.eye(32, device=DEVICE),
            ids,
            ones,
            packed,
            out,
            make_workspace(DEVICE),
            tile=Tile(64, 32, 4),
            pdl=ON_GPU,
        )
        assert torch.equal(out.t(), truth)


@pytest.mark.parametrize("scale", [0, 1, 118, 127, 128])
def test_scales_from_end_to_end(scale: int) -> None:
    """2 ** -127 is subnormal in float32; 2 ** 1 is the largest scale that the layout takes."""
    codes = torch.tensor([[0x21, 0x43, 0xA9, 0x21] * 4] * 64, dtype=torch.uint8, device=DEVICE).view(1, 64, 16)
    scales = torch.full((1, 64, 1), scale, dtype=torch.uint8, device=DEVICE)
    dense = dequantize(codes, torch.full_like(scales, 127), torch.float32)[0].double()
    unused = torch.zeros(1, 64, 8, dtype=torch.int32, device=DEVICE)
    weight = pack_mxfp4(codes.clone(), scales, "down")
    packed = PackedExperts("mxfp4", unused, weight.codes, None, weight.scales, None, None)
    # Integers, so that every sum is exact; large ones for the small scales, so that no result is subnormal.
    h = torch.randint(-8, 9, (1, 32), device=DEVICE).float() * 2.0 ** (20 if scale < 2 else 0)
    out = poisoned(1, 64, dtype=torch.float32)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    gemv_down(h, ids, torch.ones(1, 1, device=DEVICE), packed, out, make_workspace(DEVICE), pdl=ON_GPU)
    assert torch.equal(out.double(), (h.double() @ dense.t()) * 2.0 ** (scale - 127))


def test_chosen_tiles_fit_the_workspace() -> None:
    workspace = make_workspace(torch.device("cpu"))
    for rows, cols, top_k in ((2880, 2880, 4), (2048, 768, 8), (8192, 4096, 8), (64, 64, 1)):
        for num_tokens in range(1, 65):
            for format in ("dense", "mxfp4"):
                tile = choose_tile(format, rows, cols, num_tokens * top_k, top_k)
                tiles = num_tokens * -(-rows // tile.rows)
                assert tile.split == 1 or tiles <= workspace.counters.numel()
                assert tile.split == 1 or tiles * tile.split * tile.rows <= workspace.partials.numel()


def test_a_tile_that_asks_for_too_much_scratch_is_refused() -> None:
    weights = packed_copy(make_weights("dense", (1, 64, 64), False))
    ids = torch.zeros(4096, 1, dtype=torch.int32, device=DEVICE)
    h, out = torch.zeros(4096, 64, device=DEVICE), poisoned(4096, 64)
    with pytest.raises(ValueError, match="room for 4096"):
        gemv_down(h, ids, torch.ones(4096, 1), weights, out, make_workspace(DEVICE), tile=Tile(16, 64, 4, 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_inputs_of_16_bits(kind: torch.dtype) -> None:
    """They are read two at a time as one integer."""
    weights = make_weights("mxfp4", (2, 64, 32), False)
    x, routing = randn(1, 64).to(kind), make_routing(1, 2, 2)
    truth = LoopedExperts(weights, SILU, torch.float32)(x.float(), routing)
    assert error(run(x, routing, packed_copy(weights), SILU), truth) < BOUND


def test_formats_without_a_kernel_are_refused() -> None:
    weights = make_weights("dense", (1, 64, 64), False)
    weights.format = "fp8_block"
    with pytest.raises(ValueError, match="fp8_block"):
        pack_experts(weights)
