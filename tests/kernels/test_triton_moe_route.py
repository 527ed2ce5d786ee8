"""Triton's router against the reference: in the interpreter at small shapes, or on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
from kernel_device import DEVICE, KIND, ON_GPU, randn

from tokenspeed.kernels.reference.moe import Router
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.kernels.triton.moe_route import (
    FUSED_ROWS,
    FusedTile,
    SplitTile,
    TritonRoute,
    choose_tile,
    make_counters,
    route,
)
from tokenspeed.moe.interface import RouterRule, Routing

RULES = {
    "topk_softmax": lambda k: RouterRule(k, "topk_softmax", False),
    "softmax_topk": lambda k: RouterRule(k, "softmax_topk", False),
    "renormalized": lambda k: RouterRule(k, "softmax_topk", True),
}
TILES = [FusedTile(1, 4), FusedTile(4, 1), SplitTile(16, 16, 32, 1), SplitTile(16, 32, 64, 3)]


def same(ours: Routing, scores: torch.Tensor, truth: Routing) -> None:
    """Equal weights; equal experts except where two scores are nearer than rounding."""
    assert ours.expert_ids.dtype == torch.int32 and ours.weights.dtype == torch.float32
    torch.testing.assert_close(ours.weights, truth.weights, rtol=1e-4, atol=1e-5)
    chosen = scores.gather(1, ours.expert_ids.long())
    torch.testing.assert_close(chosen, scores.gather(1, truth.expert_ids.long()), rtol=1e-4, atol=1e-4)
    for row in ours.expert_ids.tolist():
        assert len(set(row)) == len(row)


SHAPES = [(1, 96, 7, 1), (5, 96, 32, 4), (3, 64, 9, 8)] + ([(1, 2880, 32, 4), (40, 2048, 128, 8)] if ON_GPU else [])
"""tokens, hidden, experts, top k."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape: tuple[int, int, int, int], tile: FusedTile | SplitTile, rule: str) -> None:
    num_tokens, width, num_experts, top_k = shape
    x, weight = randn(num_tokens, width), randn(num_experts, width) * 0.2
    fused = isinstance(tile, FusedTile)
    bias, norm = (randn(num_experts), randn(width)) if rule != "softmax_topk" else (None, None)
    counters = make_counters(DEVICE) if num_tokens <= FUSED_ROWS else torch.zeros(64, dtype=torch.int32, device=DEVICE)
    ours_x, ours = route(x, weight, bias, RULES[rule](top_k), counters, norm, 1e-5, tile, ON_GPU)
    truth_x, truth = Router()(x, weight, bias, RULES[rule](top_k), norm=norm, eps=1e-5)
    torch.testing.assert_close(ours_x, truth_x, rtol=1e-2 if ON_GPU else 1e-5, atol=1e-5)
    assert fused or norm is not None or ours_x is x
    scores = ours_x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    if norm is not None:  # the reference from our x: its rounding is not the router's
        _, truth = Router()(ours_x, weight, bias, RULES[rule](top_k))
    same(ours, scores, truth)
    assert not counters.any()


@pytest.mark.parametrize("tile", [FusedTile(2, 4), SplitTile(16, 16, 32, 2)], ids=str)
def test_ties_go_to_the_lower_expert(tile: FusedTile | SplitTile) -> None:
    """All scores zero, of both signs; then two levels."""
    x, weight = randn(2, 64), torch.zeros(12, 64, dtype=KIND, device=DEVICE)
    bias = torch.tensor([0.0, -0.0] * 6, device=DEVICE).to(KIND)
    _, routing = route(x, weight, bias, RULES["topk_softmax"](5), make_counters(DEVICE), tile=tile, pdl=ON_GPU)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(routing.weights, torch.full_like(routing.weights, 0.2))
    bias = torch.tensor([-1.0, 2.0, -1.0, 2.0] * 3, device=DEVICE).to(KIND)
    _, routing = route(x, weight, bias, RULES["topk_softmax"](8), make_counters(DEVICE), tile=tile, pdl=ON_GPU)
    assert routing.expert_ids.tolist() == [[1, 3, 5, 7, 9, 11, 0, 2]] * 2


@pytest.mark.parametrize("tile", [FusedTile(2, 4), SplitTile(16, 16, 32, 2)], ids=str)
def test_scores_that_are_not_numbers_still_name_experts(tile: FusedTile | SplitTile) -> None:
    """An id outside the experts would make the next kernel read outside the weights."""
    x, weight = randn(2, 64), randn(6, 64)
    bias = torch.tensor([1.0, float("nan"), float("-inf"), float("-inf"), 0.5, float("nan")], device=DEVICE).to(KIND)
    x[1] = float("nan")
    _, routing = route(x, weight, bias, RULES["topk_softmax"](6), make_counters(DEVICE), tile=tile, pdl=ON_GPU)
    for row in routing.expert_ids.tolist():
        assert sorted(row) == [0, 1, 2, 3, 4, 5]
    assert set(routing.expert_ids[0, :2].tolist()) == {0, 4}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile", [FusedTile(2, 4), SplitTile(16, 16, 32, 2)], ids=str)
def test_one_broken_expert_breaks_the_weights_of_its_tokens(tile: FusedTile | SplitTile, rule: str) -> None:
    """As in the reference: a request that a broken router row would serve fails instead. The expert need not be among
    the best, nor the token's x be broken; tokens without a NaN keep their weights."""
    x, weight = randn(3, 64), randn(6, 64)
    weight[4] = 0
    weight[4, 7] = float("inf")
    x[:, 7] = torch.tensor([1.0, 0.0, -1.0], device=DEVICE)  # scores of +inf, NaN and -inf
    counters = make_counters(DEVICE)
    _, ours = route(x, weight, None, RULES[rule](2), counters, tile=tile, pdl=ON_GPU)
    _, truth = Router()(x, weight, None, RULES[rule](2))
    assert truth.weights.isnan().any(dim=1).tolist() == [True, True, False]
    torch.testing.assert_close(ours.weights, truth.weights, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(len({*row} & set(range(6))) == 2 for row in ours.expert_ids.tolist())
    weight[4] = float("nan")
    _, ours = route(x, weight, None, RULES[rule](2), counters, tile=tile, pdl=ON_GPU)
    _, truth = Router()(x, weight, None, RULES[rule](2))
    assert truth.weights.isnan().all() and ours.weights.isnan().all()
    assert all(4 not in row and len({*row}) == 2 for row in ours.expert_ids.tolist())


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight, norm = randn(4, 96), randn(8, 96), randn(96)
    rule, counters = RULES["renormalized"](3), make_counters(DEVICE)
    tile = FusedTile(2, 4)
    together, routing = route(x, weight, None, rule, counters, norm, 1e-6, tile, ON_GPU)
    for token in range(4):
        row = slice(token, token + 1)
        alone, own = route(x[row].contiguous(), weight, None, rule, counters, norm, 1e-6, tile, ON_GPU)
        assert torch.equal(alone, together[row])
        assert torch.equal(own.expert_ids, routing.expert_ids[row])
        assert torch.equal(own.weights, routing.weights[row])


def test_no_tokens() -> None:
    y, routing = TritonRoute(DEVICE, ON_GPU)(randn(0, 64), randn(4, 64), None, RULES["topk_softmax"](2))
    assert y.shape == (0, 64)
    assert routing.expert_ids.shape == routing.weights.shape == (0, 2)


@pytest.mark.parametrize("num_experts", [1, 8, 32, 128, 256])
def test_chosen_tiles(num_experts: int) -> None:
    """A fused tile has a counter for every token, and a split leaves work for each part."""
    for num_tokens in (1, 2, 16, 17, 64, 65, 1000, 16384):
        tile = choose_tile(num_tokens, num_experts, 2880)
        if isinstance(tile, FusedTile):
            assert num_tokens <= make_counters(torch.device("cpu")).numel()
        else:
            steps = triton.cdiv(2880, tile.cols)
            assert (tile.split - 1) * triton.cdiv(steps, tile.split) < steps


def test_the_registry_knows_it() -> None:
    ops, report = select_ops(Need(DEVICE, KIND))
    assert isinstance(ops.route, TritonRoute if ON_GPU else Router)
    assert any(line.startswith("route: ") for line in report)
