"""MXFP4 experts on float16 tensor cores: the scales relative to their row's, x in float16, and the products, against
float64.

The last run on a Hopper GPU only: Gluon has no interpreter.
"""

from __future__ import annotations

import logging

import pytest
import torch
from expert_layers import (
    CLAMPED,
    HOPPER,
    NO_MMA,
    SWIGLU,
    dense_truth,
    error,
    ids_like,
    kernels,
    layer,
    matrix_and_truth,
    mxfp4_values,
    need_of,
    summed_truth,
)
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton.moe_align import group_pairs
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, combine, expert_matrix
from tokenspeed.kernels.triton.moe_mxfp4 import Mxfp4Weight, pack_mxfp4
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import (
    Fp16Tile,
    fp16_down,
    fp16_gate_up,
    half_rows,
    half_scale,
    in_order,
    why_no_fp16,
)
from tokenspeed.kernels.triton.moe_plans import FP16_PLANS, NO_LIMIT, ExpertPlan, Fp16Tiles, choose
from tokenspeed.moe.interface import Activation, ExpertWeights, MoeNeed, Routing

ON_HOPPER = pytest.mark.skipif(NO_MMA is not None, reason=str(NO_MMA))
EXACT_BOUND = 1e-3
"""Of results in float32: h in float16 is all that is rounded."""
BOUND = 3e-3
"""Of the op in bfloat16."""


# ---- scales relative to their row's ---------------------------------------------------------------------------------


def half_values(packed: Mxfp4Weight, codes: torch.Tensor) -> torch.Tensor:
    """What the kernel makes of scales, times codes (as stored): float64 [E, N, K]. Each product is rounded to float16,
    in which it has to be exact."""
    assert packed.references is not None and packed.references.dtype == torch.int32
    words = packed.scales.transpose(1, 2)  # [E, N, words]
    words = (words - (packed.references * 0x01010101)[:, :, None]) << 2
    bytes = torch.stack([(words >> (8 * block)) & 255 for block in range(4)], dim=-1).flatten(2)
    factors = (bytes << 8).to(torch.int16).view(torch.float16)[:, :, : packed.width // 32]
    plain = mxfp4_values(codes, torch.full(factors.shape, 127, dtype=torch.uint8, device=codes.device))
    half = (plain * 2.0**-6).half() * factors.repeat_interleave(32, -1)
    return half.double() * torch.exp2(packed.references.double() - 112)[:, :, None]


@pytest.mark.parametrize("lowest", [0, 1, 9, 100, 219])
@pytest.mark.parametrize("width", [32, 96, 128, 960])
def test_relative_scales_are_exact(width: int, lowest: int) -> None:
    """Rows whose scales are up to 29 binades apart, all codes."""
    shape = 3, 16, width // 32
    scales = torch.randint(lowest, lowest + 30, shape, dtype=torch.uint8)
    scales[0, 0], scales[1, 1] = lowest, lowest + 29
    scales[2, :, 0], scales[2, :, -1] = lowest + 29, lowest
    codes = torch.randint(0, 256, (3, 16, width // 2), dtype=torch.uint8)
    truth = mxfp4_values(codes, scales)
    packed = pack_mxfp4(codes.clone(), scales.clone(), "w")
    assert torch.equal(half_values(packed, codes), truth)
    if lowest == 100 and width == 960:
        assert int(packed.references.max() - packed.references.min()) > 0, "a row's own"


def test_scales_of_missing_columns_make_numbers() -> None:
    """Zeros are multiplied by them: a scale of zero there would be an infinite one relative to its row's."""
    scales = torch.tensor([[[127, 120, 122]] * 16], dtype=torch.uint8)
    packed = pack_mxfp4(torch.zeros(1, 16, 48, dtype=torch.uint8), scales, "w")
    bytes = packed.scales.transpose(1, 2).contiguous().view(torch.uint8)
    assert bytes[0, 3].tolist() == [133, 126, 128, 128]


def test_a_row_that_is_too_wide_has_no_reference() -> None:
    """Only where there are numbers in both blocks."""
    scales = torch.full((2, 16, 2), 130, dtype=torch.uint8)
    codes = torch.full((2, 16, 32), 0x11, dtype=torch.uint8)
    assert pack_mxfp4(codes.clone(), scales, "w").references is not None
    scales[1, 5, 1] = 100
    assert pack_mxfp4(codes.clone(), scales, "w").references is None
    for block in (0, 1):
        empty = codes.clone()
        empty[1, 5, 16 * block : 16 * block + 16] = 0x80  # minus zero is one too
        packed = pack_mxfp4(empty.clone(), scales, "w")
        assert packed.references is not None
        assert torch.equal(half_values(packed, empty), mxfp4_values(empty, scales))


def test_reasons_against_these_kernels() -> None:
    matrix = ExpertMatrix("mxfp4", torch.empty(0), None, None, 16, 32, torch.empty(0))
    without = ExpertMatrix("mxfp4", torch.empty(0), None, None, 16, 32)
    assert why_no_fp16(CLAMPED, matrix, matrix) is None
    assert "no limit" in str(why_no_fp16(SWIGLU, matrix, matrix))
    for matrices in ((matrix, without), (without, matrix)):
        assert "further apart" in str(why_no_fp16(CLAMPED, *matrices))
    assert half_scale(CLAMPED) == 1024 and half_scale(Activation(1.0, 1.702)) == 16384


# ---- x in float16 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (3, 96), (5, 288)] + ([(64, 2880)] if ON_GPU else []))
def test_float16_rows_are_x(num_rows: int, width: int) -> None:
    """Exactly, for bfloat16 numbers that are not below 2^-31 of the largest of their row."""
    sizes = torch.exp2(8 * torch.randn(num_rows, width, device=DEVICE).clamp(-1.5, 1.5))
    x = (torch.randn(num_rows, width, device=DEVICE) * sizes).to(torch.bfloat16)
    x[0] *= 2.0**-60
    largest = x.float().abs().amax(1, keepdim=True)
    x = torch.where(x.float().abs() < largest * 2.0**-31, 0.0, x)
    rows = half_rows(x.to(KIND), HOPPER)
    assert rows.values.dtype == torch.float16 and (torch.frexp(rows.inverse.cpu()).mantissa == 0.5).all()
    scaled = largest / rows.inverse[:, None]
    assert ((scaled >= 2.0**14) & (scaled < 2.0**15)).all()
    assert torch.equal(rows.joined(), x.float())


def test_columns_have_the_order_of_the_operand() -> None:
    """A thread's four neighbours of each eight are two and two, eight apart."""
    x = torch.arange(1, 33, dtype=torch.float32, device=DEVICE)[None].to(KIND)
    values = (half_rows(x, HOPPER).values.float() / 512).int().flatten().tolist()
    of_sixteen = [1, 2, 5, 6, 9, 10, 13, 14, 3, 4, 7, 8, 11, 12, 15, 16]
    assert values == of_sixteen + [16 + column for column in of_sixteen]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_nan(value: float) -> None:
    x = torch.randn(4, 96, device=DEVICE).bfloat16().to(KIND)
    x[1, 7], x[3] = value, 0.0
    joined = half_rows(x, HOPPER).joined()
    assert joined[1, 7].isnan() and joined.isnan().sum() == 1
    assert torch.equal(joined[0], x[0].float()) and not joined[3].any()


# ---- which layers ---------------------------------------------------------------------------------------------------


def stored_layer(lowest_scale: int) -> ExpertWeights:
    """Codes that are all 1, scales of 120 but for one."""
    codes = [torch.full((4, n, k // 2), 0x11, dtype=torch.uint8, device=DEVICE) for n, k in ((64, 64), (64, 32))]
    scales = [torch.full((4, 64, k), 120, dtype=torch.uint8, device=DEVICE) for k in (2, 1)]
    scales[0][1, 9, 1] = lowest_scale
    return ExpertWeights("mxfp4", *codes, *scales)


def pack_bfloat16(ours: TritonExpertKernels, weights: ExpertWeights, activation: Activation) -> TritonExperts:
    need = MoeNeed("cuda", torch.bfloat16, 4, 2, 64, 32, "mxfp4", False, activation)
    return ours.pack(weights, need)


def test_layers_that_float16_cannot_hold_keep_the_other_kernels(caplog: pytest.LogCaptureFixture) -> None:
    ours = TritonExpertKernels(DEVICE, False, None, 227 * 1024, "a GPU without a table", None)
    with caplog.at_level(logging.INFO):
        plans = pack_bfloat16(ours, stored_layer(100), CLAMPED).plans
        assert plans[-1].fp16 is not None
        assert not any("float16 tensor cores" in record.message for record in caplog.records)
        for weights, activation, reason in (
            (stored_layer(80), CLAMPED, "further apart"),
            (stored_layer(100), SWIGLU, "no limit"),
        ):
            plans = pack_bfloat16(ours, weights, activation).plans
            assert all(plan.mma is not None and plan.fp16 is None for plan in plans)
            assert any("float16 tensor cores" in line.message and reason in line.message for line in caplog.records)
            caplog.clear()


# ---- the products ---------------------------------------------------------------------------------------------------

SHAPES = [(6, 3, 96, 64), (5, 2, 160, 224), (3, 3, 32, 32), (8, 4, 288, 1024), (32, 4, 2880, 2880)]
"""experts, top k, hidden, intermediate"""
TILES = {
    "few": (FP16_PLANS[0][2], FP16_PLANS[0][3]),
    "many": (FP16_PLANS[1][2], FP16_PLANS[1][3]),
    "ahead": (16, Fp16Tile(128, 4, 4, 2, True, 8)),
    "small": (8, Fp16Tile(64, 6, 4, 1, False, 8)),
}
"""Pairs of a tile, tile."""


def check_products(
    shape: tuple[int, int, int, int], num_tokens: int, how: str, block_m: int, tile: Fp16Tile, activation: Activation,
    has_bias: bool = True,
) -> None:  # fmt: skip
    """h and the sum against float64."""
    num_experts, top_k, hidden, inner = shape
    up, *up_truth = matrix_and_truth("mxfp4", num_experts, 2 * inner, hidden, True, has_bias)
    down, *down_truth = matrix_and_truth("mxfp4", num_experts, hidden, inner, False, has_bias)
    x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
    ids, weights = ids_like(num_tokens, top_k, num_experts, how), torch.rand(num_tokens, top_k, device=DEVICE)
    truth = dense_truth(x, ids, (up_truth[0], up_truth[1]), activation)
    grouping = group_pairs(ids, num_experts, block_m)
    h = fp16_gate_up(half_rows(x), up, grouping, top_k, activation, tile)
    joined = in_order(h).float() / half_scale(activation)
    assert error(joined, truth.flatten(0, 1)[grouping.pairs.long()]) < EXACT_BOUND
    parts = fp16_down(h, down, grouping, weights, activation, torch.float32, tile)
    assert parts.shape == (1, num_tokens * top_k, hidden)
    out = combine(parts, num_tokens, top_k, None, torch.float32)
    assert error(out, summed_truth(truth, ids, weights, (down_truth[0], down_truth[1]))) < EXACT_BOUND


@ON_HOPPER
@pytest.mark.parametrize(
    ("tile_name", "place", "num_tokens", "how"),
    [
        ("few", 0, 37, "any"), ("few", 3, 70, "few"), ("many", 1, 151, "any"), ("many", 3, 250, "one"),
        ("ahead", 2, 50, "any"), ("ahead", 1, 9, "few"), ("small", 0, 21, "one"), ("small", 2, 1, "any"),
    ],
)  # fmt: skip
def test_products_of_small_layers(tile_name: str, place: int, num_tokens: int, how: str, poisoned: None) -> None:
    """Rows and columns that no tile divides, experts with no pair, with a few, with several tiles."""
    block_m, tile = TILES[tile_name]
    check_products(SHAPES[place], num_tokens, how, block_m, tile, CLAMPED)


@ON_HOPPER
@pytest.mark.parametrize(
    ("tile_name", "num_tokens", "how", "activation", "has_bias"),
    [
        ("few", 200, "any", CLAMPED, True), ("many", 1100, "any", CLAMPED, True), ("many", 300, "few", CLAMPED, True),
        ("many", 40, "one", CLAMPED, True), ("few", 140, "any", Activation(2.0, 1.0), False),
    ],
)  # fmt: skip
def test_products_of_gpt_oss(tile_name: str, num_tokens: int, how: str, activation: Activation, has_bias: bool) -> None:
    block_m, tile = TILES[tile_name]
    check_products(SHAPES[-1], num_tokens, how, block_m, tile, activation, has_bias)


@ON_HOPPER
@pytest.mark.parametrize("num_tokens", [129, 512, 1031])
def test_the_op_with_its_own_plans(num_tokens: int) -> None:
    """Uneven experts of gpt-oss-20b's layer, two of them empty; alone and added to a residual."""
    need = need_of("mxfp4", *SHAPES[-1], True, CLAMPED)
    experts, up_truth, down_truth = layer("mxfp4", need, True)
    assert choose(experts.plans, num_tokens).fp16 is not None
    scores = torch.rand(num_tokens, 32, device=DEVICE) + torch.linspace(0, 0.7, 32, device=DEVICE)
    scores[:, 3:5] = -1.0
    ids = scores.topk(4, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, 4, device=DEVICE)
    x = torch.randn(num_tokens, need.hidden_size, device=DEVICE).bfloat16()
    h = dense_truth(x, ids, (up_truth[0], up_truth[1]), CLAMPED)
    truth = summed_truth(h, ids, weights, (down_truth[0], down_truth[1]))
    out = experts(x, Routing(ids, weights))
    assert error(out, truth) < BOUND
    rows = (out.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(rows.max()) < 2 * BOUND
    residual = torch.randn_like(x)
    before = residual.clone()
    assert experts(x, Routing(ids, weights), residual) is residual
    assert error(residual, truth + before.double()) < BOUND


@ON_HOPPER
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_alone(value: float) -> None:
    """One number makes all of its row's results NaN, and changes no bit of another row's."""
    need = need_of("mxfp4", 6, 2, 160, 96, True, CLAMPED)
    experts, _, _ = layer("mxfp4", need, True)
    block_m, tile = TILES["small"]
    experts.plans = (ExpertPlan(NO_LIMIT, block_m=block_m, fp16=Fp16Tiles(tile, tile)),)
    x = torch.randn(9, 160, device=DEVICE).bfloat16()
    routing = Routing(ids_like(9, 2, 6, "any"), torch.rand(9, 2, device=DEVICE) + 0.1)
    before = experts(x, routing)
    bad = x.clone()
    bad[4, 33] = value
    after = experts(bad, routing)
    others = torch.arange(9, device=DEVICE) != 4
    assert before.isfinite().all() and torch.equal(after[others], before[others])
    assert after[4].isnan().all()


@ON_HOPPER
def test_every_column_of_h_is_multiplied_by_its_own() -> None:
    """Single ones give columns of the matrix, exactly, with scales as far apart as they may be."""
    num_experts, hidden, inner = 2, 96, 288
    block_m, tile = TILES["ahead"]
    codes = torch.randint(0, 256, (num_experts, hidden, inner // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(100, 130, (num_experts, hidden, inner // 32), dtype=torch.uint8, device=DEVICE)
    truth = mxfp4_values(codes, scales)
    matrix = expert_matrix("mxfp4", pack_mxfp4(codes, scales, "down"), None, None)
    ids = (torch.arange(inner, device=DEVICE, dtype=torch.int32) % num_experts)[:, None].contiguous()
    grouping = group_pairs(ids, num_experts, block_m)
    hot = half_rows(torch.eye(inner, device=DEVICE).bfloat16())
    assert (hot.inverse == 2.0**-14).all()
    h = (hot.values[grouping.pairs.long()].float() * 2.0**-14 * half_scale(CLAMPED)).half()
    parts = fp16_down(h, matrix, grouping, torch.ones(inner, 1, device=DEVICE), CLAMPED, torch.float32, tile)
    assert torch.equal(parts[0].double(), truth[ids[:, 0].long(), :, torch.arange(inner, device=DEVICE)])


@ON_HOPPER
def test_a_layer_with_a_row_that_is_too_wide_is_right() -> None:
    """By the other kernels, in a prompt too."""
    activation = CLAMPED
    weights = stored_layer(80)
    truth_up, truth_down = (
        mxfp4_values(codes, scales)
        for codes, scales in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale))
        if scales is not None
    )
    experts = pack_bfloat16(kernels(), weights, activation)
    ids, mix = ids_like(300, 2, 4, "any"), torch.rand(300, 2, device=DEVICE)
    x = torch.randn(300, 64, device=DEVICE).bfloat16()
    no_bias = torch.zeros(4, 64, device=DEVICE).double()
    h = dense_truth(x, ids, (truth_up, no_bias), activation)
    truth = summed_truth(h, ids, mix, (truth_down, no_bias))
    assert error(experts(x, Routing(ids, mix)), truth) < BOUND
