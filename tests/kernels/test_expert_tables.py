"""Which tiles a layer's experts get: those of the GPU's table where it has the shape, else a heuristic's, and the log
says which."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels
from tokenspeed.kernels.triton.moe_grouped import GroupedTile
from tokenspeed.kernels.triton.moe_mxfp4_mma import MmaTile
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    MmaTiles,
    ShapePlans,
    choose,
    heuristic_plans,
    load_table,
    mma_plans,
    read_table,
)
from tokenspeed.kernels.triton.moe_steps import FP16, GROUPED, GROUPED_ON_HOPPER, MMA, steps_of
from tokenspeed.moe.interface import Activation, ExpertWeights, MoeNeed
from tokenspeed.protocol.errors import ConfigError

SHARED_BYTES = 227 * 1024
CLAMPED = Activation(7.0)
PLANS = (
    ExpertPlan(3, gemv=True),
    ExpertPlan(NO_LIMIT, False, 32, GroupedTile(32, 32, 1, 2, 4), GroupedTile(64, 64, 3, 2, 4)),
)
SHAPE = ExpertShape("dense", 4, 2, 64, 32)
MXFP4_SHAPE = ExpertShape("mxfp4", 4, 2, 64, 32)
MMA_ONLY = (ExpertPlan(NO_LIMIT, block_m=8, mma=MmaTiles(MmaTile(64, 2), MmaTile(128, unroll=True))),)
TABLE = ExpertTable("a GPU", (ShapePlans(SHAPE, "a test", PLANS), ShapePlans(MXFP4_SHAPE, "another test", MMA_ONLY)))


def need_of(num_experts: int, dtype: torch.dtype = torch.bfloat16) -> MoeNeed:
    return MoeNeed("cuda", dtype, num_experts, 2, 64, 32, "dense", False, Activation())


def plans_of(kernels: TritonExpertKernels, need: MoeNeed) -> tuple[ExpertPlan, ...]:
    gate_up = torch.zeros(need.num_experts, 64, 64, dtype=need.dtype, device=DEVICE)
    down = torch.zeros(need.num_experts, 64, 32, dtype=need.dtype, device=DEVICE)
    return kernels.pack(ExpertWeights("dense", gate_up, down), need).plans


def test_a_shape_of_the_table_gets_its_plans(caplog: pytest.LogCaptureFixture) -> None:
    kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU", None)
    with caplog.at_level(logging.INFO):
        assert plans_of(kernels, need_of(4)) == plans_of(kernels, need_of(4)) == PLANS
    assert [record.message for record in caplog.records] == ["expert kernels: tiles measured on a GPU (a test)"]
    assert [choose(PLANS, count) for count in (1, 3, 4, 9000)] == [PLANS[0], PLANS[0], PLANS[1], PLANS[1]]


@pytest.mark.parametrize("table", [None, TABLE])
def test_another_shape_gets_the_heuristic_and_the_log_says_so(
    table: ExpertTable | None, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = TritonExpertKernels(DEVICE, False, table, SHARED_BYTES, "a GPU", None)
    with caplog.at_level(logging.INFO):
        plans = plans_of(kernels, need_of(6))
    assert plans == heuristic_plans(ExpertShape("dense", 6, 2, 64, 32), True, SHARED_BYTES, False)
    (line,) = [record.message for record in caplog.records]
    assert "no tuned tiles for a GPU and 6 dense experts of 64 x 32, top 2" in line and "--tune" in line


def test_float32_is_not_what_was_measured() -> None:
    kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU", None)
    assert plans_of(kernels, need_of(4, torch.float32)) == heuristic_plans(SHAPE, True, SHARED_BYTES, True)


def mxfp4_plans(
    kernels: TritonExpertKernels, dtype: torch.dtype = torch.bfloat16, activation: Activation = CLAMPED
) -> tuple[ExpertPlan, ...]:
    codes = [torch.zeros(4, 64, width, dtype=torch.uint8, device=DEVICE) for width in (32, 16)]
    scales = [torch.zeros(4, 64, width, dtype=torch.uint8, device=DEVICE) for width in (2, 1)]
    need = MoeNeed("cuda", dtype, 4, 2, 64, 32, "mxfp4", False, activation)
    return kernels.pack(ExpertWeights("mxfp4", *codes, *scales), need).plans


def test_mxfp4_goes_to_fp8_tensor_cores_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """And otherwise by the other kernels, whatever the table says; the log names the reason."""
    with caplog.at_level(logging.INFO):
        kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU", None)
        assert mxfp4_plans(kernels) == MMA_ONLY
        kernels = TritonExpertKernels(DEVICE, False, None, SHARED_BYTES, "a GPU", None)
        assert all(plan.mma or plan.fp16 for plan in mxfp4_plans(kernels))
        assert not any("plain arithmetic" in record.message for record in caplog.records)
        assert any("(another test)" in record.message for record in caplog.records)
        kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU", "it is too old")
        assert mxfp4_plans(kernels) == heuristic_plans(MXFP4_SHAPE, False, SHARED_BYTES, False)
        assert any("plain arithmetic" in line.message and "too old" in line.message for line in caplog.records)
    kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU", None)
    assert mxfp4_plans(kernels, torch.float32) == heuristic_plans(MXFP4_SHAPE, False, SHARED_BYTES, True)
    assert not any(plan.mma for plan in heuristic_plans(MXFP4_SHAPE, False, SHARED_BYTES, False))


def test_without_a_table_gpt_oss_20b_has_the_tiles_that_were_measured() -> None:
    """`MMA_PLANS` and `FP16_PLANS` are those of the shipped table. A shape that was not measured is not in it."""
    table = load_table("NVIDIA H200")
    assert table is not None
    shape = ExpertShape("mxfp4", 32, 4, 2880, 2880)
    tuned = table.find(shape)
    assert tuned is not None
    assert tuned.plans == mma_plans(shape, True)
    for entry in table.experts:
        assert entry.shape == shape or entry.plans != heuristic_plans(
            entry.shape, True, SHARED_BYTES, False, True, True
        )
    assert table.find(replace(shape, num_experts=48)) is None


@pytest.mark.parametrize("num_experts", [32, 128])
def test_prompts_go_to_float16_tensor_cores_by_what_an_expert_gets(num_experts: int) -> None:
    plans = mma_plans(ExpertShape("mxfp4", num_experts, 4, 2880, 2880), True)
    assert [plan.fp16 is not None for plan in plans] == [False] * (len(plans) - 2) + [True] * 2
    for pairs, block_m in ((1, 8), (14, 16), (15, 32), (40, 32), (41, 128), (1000, 128)):
        plan = choose(plans, num_experts * pairs // 4)
        assert plan.block_m == block_m and (plan.fp16 is not None) == (pairs > 14)


def test_a_plans_tiles_say_which_kernels_run() -> None:
    for plan in mma_plans(ExpertShape("mxfp4", 32, 4, 2880, 2880), True):
        up, down = plan.tiles
        assert steps_of(up) is steps_of(down) is (FP16 if plan.fp16 else MMA)
        chosen = plan.fp16 or plan.mma
        assert chosen is not None and (up, down) == (chosen.gate_up, chosen.down)
    plan = PLANS[1]
    assert plan.tiles == (plan.gate_up, plan.down)
    for hopper in (False, True):
        steps = steps_of(plan.tiles[0], hopper)
        assert steps is (GROUPED_ON_HOPPER if hopper else GROUPED) and steps.hopper == hopper


def test_a_table_with_tiles_that_do_not_serve_a_layer_is_not_its_table() -> None:
    """The plans of float16 tensor cores; a layer of the same shape whose activation has no limit."""
    entry = ShapePlans(MXFP4_SHAPE, "a test", mma_plans(MXFP4_SHAPE, True))
    kernels = TritonExpertKernels(DEVICE, False, ExpertTable("a GPU", (entry,)), SHARED_BYTES, "a GPU", None)
    assert mxfp4_plans(kernels) == entry.plans
    assert mxfp4_plans(kernels, activation=Activation()) == mma_plans(MXFP4_SHAPE, False)


def test_a_table_comes_back_from_its_file() -> None:
    assert read_table(msgspec.json.encode(TABLE)) == TABLE
    with pytest.raises(ConfigError, match="a table of kernel tiles that cannot be read"):
        read_table(b'{"gpu": 1}')
