"""Triton's dense experts for few tokens against the reference in float32: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU, randn

from tokenspeed.kernels.reference.moe import LoopedExperts
from tokenspeed.kernels.triton.moe_gemv import (
    DenseExperts,
    Tile,
    choose_tile,
    gemv_down,
    gemv_gate_up,
    make_workspace,
)
from tokenspeed.moe.interface import Activation, ExpertWeights, Routing

BOUND = 1e-2 if torch.bfloat16 == KIND else 2e-6
SILU, CLAMPED = Activation(), Activation(limit=1.5, alpha=1.702)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def make_weights(sizes: tuple[int, int, int], has_bias: bool) -> ExpertWeights:
    """sizes: experts, hidden, intermediate."""
    num, hidden, inner = sizes
    biases = (randn(num, 2 * inner), randn(num, hidden)) if has_bias else (None, None)
    gate_up, down = randn(num, 2 * inner, hidden) * 0.1, randn(num, hidden, inner) * 0.1
    return ExpertWeights("dense", gate_up, down, None, None, *biases)


def make_routing(num_tokens: int, num_experts: int, top_k: int) -> Routing:
    ids = torch.stack([torch.randperm(num_experts, device=DEVICE)[:top_k] for _ in range(num_tokens)])
    return Routing(ids.to(torch.int32), torch.rand(num_tokens, top_k, device=DEVICE).softmax(-1))


def poisoned(*shape: int, dtype: torch.dtype = KIND) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def kernel_form(weights: ExpertWeights) -> DenseExperts:
    return DenseExperts(weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)


def run(
    x: torch.Tensor,
    routing: Routing,
    packed: DenseExperts,
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
def test_equal_to_the_reference(shape: tuple[int, int, int, int, int], activation: Activation) -> None:
    num_experts, hidden, inner, num_tokens, top_k = shape
    clamped = activation is CLAMPED  # with biases and a residual, as in GPT-OSS
    weights = make_weights((num_experts, hidden, inner), clamped)
    x, routing = randn(num_tokens, hidden), make_routing(num_tokens, num_experts, top_k)
    residual = randn(num_tokens, hidden) if clamped else None
    wide = None if residual is None else residual.float()
    truth = LoopedExperts(weights, activation, torch.float32)(x.float(), routing, wide)
    # Few programs in the interpreter, the chosen tiles on a GPU.
    tiles = (None, None) if ON_GPU else (Tile(64, 64, 4), Tile(64, 64, 4, 1 + clamped))
    assert error(run(x, routing, kernel_form(weights), activation, tiles, residual), truth) < BOUND


def test_widths_that_are_not_powers_of_two() -> None:
    weights = make_weights((5, 96, 48), True)
    x, routing = randn(2, 96), make_routing(2, 5, 3)
    truth = LoopedExperts(weights, CLAMPED, torch.float32)(x.float(), routing)
    tiles = Tile(4, 64, 4), Tile(16, 32, 4, 4)
    assert error(run(x, routing, kernel_form(weights), CLAMPED, tiles), truth) < BOUND


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
def test_every_kind_of_tile(tiles: tuple[Tile, Tile]) -> None:
    weights = make_weights((3, 96, 64), True)
    x, routing = randn(2, 96), make_routing(2, 3, 2)
    truth = LoopedExperts(weights, CLAMPED, torch.float32)(x.float(), routing)
    assert error(run(x, routing, kernel_form(weights), CLAMPED, tiles), truth) < BOUND


def test_tokens_that_share_experts() -> None:
    """A row's result does not depend on the other rows: bit for bit."""
    weights = kernel_form(make_weights((4, 64, 64), True))
    x, routing = randn(3, 64), make_routing(3, 4, 4)
    tiles = Tile(64, 64, 4), Tile(64, 64, 4)
    together = run(x, routing, weights, CLAMPED, tiles)
    for token in range(3):
        row = slice(token, token + 1)
        alone = Routing(routing.expert_ids[row].contiguous(), routing.weights[row].contiguous())
        assert torch.equal(run(x[row].contiguous(), alone, weights, CLAMPED, tiles), together[row])


def test_the_clamp_acts() -> None:
    """With large inputs nearly every gate and up is at its limit."""
    weights = make_weights((2, 64, 32), True)
    x, routing = randn(1, 64) * 100, make_routing(1, 2, 2)
    h = gemv_gate_up(x, routing.expert_ids, kernel_form(weights), CLAMPED, pdl=ON_GPU)
    assert float(h.abs().max()) <= 1.5 * 2.5
    assert float(h.max()) > 3.4


def test_chosen_tiles_fit_the_workspace() -> None:
    workspace = make_workspace(torch.device("cpu"))
    for rows, cols in ((2880, 2880), (2048, 768), (8192, 4096), (64, 64)):
        for num_tokens in range(1, 65):
            tile = choose_tile(cols, num_tokens)
            tiles = num_tokens * -(-rows // tile.rows)
            assert tile.split == 1 or tiles <= workspace.counters.numel()
            assert tile.split == 1 or tiles * tile.split * tile.rows <= workspace.partials.numel()


def test_a_tile_that_asks_for_too_much_scratch_is_refused() -> None:
    weights = kernel_form(make_weights((1, 64, 64), False))
    ids = torch.zeros(4096, 1, dtype=torch.int32, device=DEVICE)
    h, out = torch.zeros(4096, 64, device=DEVICE), poisoned(4096, 64)
    with pytest.raises(ValueError, match="room for 4096"):
        gemv_down(h, ids, torch.ones(4096, 1), weights, out, make_workspace(DEVICE), tile=Tile(16, 64, 4, 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_inputs_of_16_bits(kind: torch.dtype) -> None:
    weights = make_weights((2, 64, 32), False)
    x, routing = randn(1, 64).to(kind), make_routing(1, 2, 2)
    truth = LoopedExperts(weights, SILU, torch.float32)(x.float(), routing)
    assert error(run(x, routing, kernel_form(weights), SILU), truth) < BOUND
