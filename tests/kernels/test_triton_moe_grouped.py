"""Grouping of pairs, tensor-core experts and the op `experts` against plain torch in float64.

On a GPU in bfloat16 and also at the shapes of GPT-OSS and Qwen3 MoE; elsewhere the same code in Triton's interpreter.
"""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from expert_layers import (
    CLAMPED,
    HOPPER,
    SWIGLU,
    error,
    ids_like,
    layer,
    matrix_and_truth,
    need_of,
    truth_of,
)
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton.moe_align import MAX_SMALL_PAIRS, group_pairs
from tokenspeed.kernels.triton.moe_grouped import (
    ExpertMatrix,
    GroupedTile,
    combine,
    grouped_down,
    grouped_gate_up,
)
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    choose,
    heuristic_plans,
    load_table,
    table_name,
)
from tokenspeed.moe.interface import Activation, ExpertFormat, Routing

BOUND = 1e-2 if torch.bfloat16 == KIND else 4e-6
FORMATS: tuple[ExpertFormat, ...] = ("dense", "mxfp4", "fp8_block")


# ---- grouping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["any", "few", "one"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [
        (1, 4, 32, 16),
        (1, 1, 1, 16),
        (5, 8, 128, 16),
        (40, 4, 32, 16),
        (128, 4, 32, 64),
        (256, 4, 128, 16),
        (257, 4, 7, 16),
        (300, 8, 20, 32),
    ],
)
def test_pairs_are_grouped(num_tokens: int, top_k: int, num_experts: int, block_m: int, how: str) -> None:
    """Stable by expert, every pair in one tile of its expert, both paths."""
    ids = ids_like(num_tokens, top_k, num_experts, how)
    grouping = group_pairs(ids, num_experts, block_m, HOPPER)
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
    assert 256 * 4 == MAX_SMALL_PAIRS < 257 * 4


# ---- the two products and the sum -----------------------------------------------------------------------------------


def run_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: ExpertMatrix, down: ExpertMatrix,
    activation: Activation, residual: torch.Tensor | None, block_m: int, tile: GroupedTile, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    grouping = group_pairs(ids, num_experts, block_m, HOPPER)
    h = grouped_gate_up(x, up, grouping, ids.shape[1], activation, tile, HOPPER)
    parts = grouped_down(h, down, grouping, weights, torch.float32, tile, HOPPER)
    return combine(parts, x.shape[0], ids.shape[1], residual, x.dtype, HOPPER)


TILES = {
    "small": (16, GroupedTile(64, 64, 1, 3, 4)),
    "split": (16, GroupedTile(128, 128, 2, 3, 4, 2, 2)),
    "large": (64, GroupedTile(128, 64, 1, 3, 8, 4)),
}


@pytest.mark.parametrize("tile_name", TILES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "inner", "how", "activation"),
    [
        (1, 1, 1, 64, 32, "any", SWIGLU),
        (3, 4, 6, 96, 96, "any", CLAMPED),
        (9, 2, 4, 160, 224, "one", CLAMPED),
        (21, 3, 5, 288, 64, "few", SWIGLU),
    ],
)
def test_grouped_experts(
    num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int, how: str,
    activation: Activation, format: ExpertFormat, tile_name: str,
) -> None:  # fmt: skip
    """The clamped activation with biases and a residual, the other without."""
    block_m, tile = TILES[tile_name]
    has_bias = activation is CLAMPED
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


# ---- the op ---------------------------------------------------------------------------------------------------------


OP_SHAPES = [(6, 3, 96, 64)] + ([(32, 4, 2880, 2880), (128, 8, 2048, 768)] if ON_GPU else [])
OP_TOKENS = (0, 1, 5, 40) + ((2, 17, 64, 300, 2100) if ON_GPU else ())


@pytest.mark.parametrize("num_tokens", OP_TOKENS)
@pytest.mark.parametrize("shape", OP_SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_experts_op(format: ExpertFormat, shape: tuple[int, int, int, int], num_tokens: int, poisoned: None) -> None:
    """With and without a residual; some experts are never chosen."""
    has_bias, activation = (True, CLAMPED) if format == "mxfp4" else (False, SWIGLU)
    need = need_of(format, *shape, has_bias, activation)
    experts, up_truth, down_truth = layer(format, need, has_bias)
    x = torch.randn(num_tokens, need.hidden_size, device=DEVICE).to(KIND)
    ids = ids_like(num_tokens, need.top_k, need.num_experts - 2, "any")
    weights = torch.rand(num_tokens, need.top_k, device=DEVICE)
    residual = torch.randn(num_tokens, need.hidden_size, device=DEVICE).to(KIND)
    pairs = (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1])
    truth = truth_of(x, ids, weights, *pairs, activation, None)
    routing = Routing(ids, weights)
    assert error(experts(x, routing), truth) < BOUND
    added = residual.clone()
    assert experts(x, routing, added) is added
    assert error(added, truth + residual.double()) < BOUND


@pytest.mark.parametrize("sizes", [(6, 3, 96, 64), (5, 2, 160, 224)], ids=str)
def test_dense_weights_by_the_copy_engine(sizes: tuple[int, int, int, int]) -> None:
    """Tiles reach past an expert's rows and columns."""
    if ON_GPU and not HOPPER:
        pytest.skip("the copy engine came with Hopper")
    need = need_of("dense", *sizes, True, SWIGLU)
    experts, up_truth, down_truth = layer("dense", need, True)
    tile = GroupedTile(128, 64, 1, 3, 4, tma=True)
    experts.plans = (ExpertPlan(NO_LIMIT, False, 16, tile, tile),)
    x = torch.randn(23, need.hidden_size, device=DEVICE).to(KIND)
    ids, weights = ids_like(23, need.top_k, need.num_experts, "any"), torch.rand(23, need.top_k, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), SWIGLU, None)
    assert error(experts(x, Routing(ids, weights)), truth) < BOUND


@pytest.mark.parametrize("num_tokens", [20, 40])
def test_a_row_does_not_depend_on_its_place(num_tokens: int) -> None:
    need = need_of("mxfp4", 6, 2, 96, 64, True, CLAMPED)
    experts, _, _ = layer("mxfp4", need, True)
    x = torch.randn(num_tokens, 96, device=DEVICE).to(KIND)
    ids, weights = ids_like(num_tokens, 2, 6, "any"), torch.rand(num_tokens, 2, device=DEVICE)
    order = torch.randperm(num_tokens, device=DEVICE)
    out = experts(x, Routing(ids, weights))
    moved = experts(x[order].contiguous(), Routing(ids[order].contiguous(), weights[order].contiguous()))
    assert torch.equal(out[order], moved)


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_chooses_the_tiles(format: ExpertFormat) -> None:
    shape = ExpertShape(format, 6, 3, 96, 64)
    plan = ExpertPlan(NO_LIMIT, False, 32, GroupedTile(32, 32, 1, 2, 4), GroupedTile(64, 64, 3, 2, 4))
    table = ExpertTable("a GPU")
    assert table.find(shape) is None
    need = need_of(format, 6, 3, 96, 64, False, SWIGLU)
    experts, up_truth, down_truth = layer(format, need, False)
    experts.plans = (plan,)
    x = torch.randn(7, 96, device=DEVICE).to(KIND)
    ids, weights = ids_like(7, 3, 6, "any"), torch.rand(7, 3, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), SWIGLU, None)
    assert error(experts(x, Routing(ids, weights)), truth) < BOUND


def test_plans_cover_every_number_of_tokens() -> None:
    for shared_bytes in (99 * 1024, 227 * 1024):
        for format in FORMATS:
            for sizes in ((32, 4, 2880, 2880), (128, 8, 2048, 768), (4, 4, 64, 64)):
                for has_mma in (False, True) if format == "mxfp4" else (False,):
                    shape = ExpertShape(format, *sizes)
                    plans = heuristic_plans(shape, format == "dense", shared_bytes, False, has_mma)
                    limits = [plan.max_tokens for plan in plans]
                    assert limits == sorted(set(limits)) and limits[-1] == NO_LIMIT
                    assert [choose(plans, n).max_tokens for n in limits] == limits
                    assert has_mma == any(plan.mma for plan in plans)


def test_shipped_tables_can_be_read() -> None:
    assert table_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert load_table("a GPU that nobody has") is None
    folder = resources.files("tokenspeed.kernels.triton").joinpath("tables")
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.endswith(".json"):
            table = load_table(file.name.removesuffix(".json"))
            assert table is not None and table.experts
            for entry in table.experts:
                assert table.find(entry.shape) is entry and entry.measured
                limits = [plan.max_tokens for plan in entry.plans]
                assert limits == sorted(set(limits)) and limits[-1] == NO_LIMIT
