"""Which tiles a layer's experts get: those of the GPU's table where it has the shape, else a heuristic's, and the log
says which."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels
from tokenspeed.kernels.triton.moe_grouped import GroupedTile
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    ShapePlans,
    choose,
    heuristic_plans,
    read_table,
)
from tokenspeed.moe.interface import Activation, ExpertWeights, MoeNeed
from tokenspeed.protocol.errors import ConfigError

SHARED_BYTES = 227 * 1024
PLANS = (
    ExpertPlan(3, gemv=True),
    ExpertPlan(NO_LIMIT, False, 32, GroupedTile(32, 32, 1, 2, 4), GroupedTile(64, 64, 3, 2, 4)),
)
SHAPE = ExpertShape("dense", 4, 2, 64, 32)
TABLE = ExpertTable("a GPU", "a test", (ShapePlans(SHAPE, PLANS),))


def need_of(num_experts: int, dtype: torch.dtype = torch.bfloat16) -> MoeNeed:
    return MoeNeed("cuda", dtype, num_experts, 2, 64, 32, "dense", False, Activation())


def plans_of(kernels: TritonExpertKernels, need: MoeNeed) -> tuple[ExpertPlan, ...]:
    gate_up = torch.zeros(need.num_experts, 64, 64, dtype=need.dtype, device=DEVICE)
    down = torch.zeros(need.num_experts, 64, 32, dtype=need.dtype, device=DEVICE)
    return kernels.pack(ExpertWeights("dense", gate_up, down), need).plans


def test_a_shape_of_the_table_gets_its_plans(caplog: pytest.LogCaptureFixture) -> None:
    kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU")
    with caplog.at_level(logging.INFO):
        assert plans_of(kernels, need_of(4)) == plans_of(kernels, need_of(4)) == PLANS
    assert [record.message for record in caplog.records] == ["expert kernels: tiles measured on a GPU (a test)"]
    assert [choose(PLANS, count) for count in (1, 3, 4, 9000)] == [PLANS[0], PLANS[0], PLANS[1], PLANS[1]]


@pytest.mark.parametrize("table", [None, TABLE])
def test_another_shape_gets_the_heuristic_and_the_log_says_so(
    table: ExpertTable | None, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = TritonExpertKernels(DEVICE, False, table, SHARED_BYTES, "a GPU")
    with caplog.at_level(logging.INFO):
        plans = plans_of(kernels, need_of(6))
    assert plans == heuristic_plans(ExpertShape("dense", 6, 2, 64, 32), True, SHARED_BYTES, False)
    (line,) = [record.message for record in caplog.records]
    assert "no tuned tiles for a GPU and 6 dense experts of 64 x 32, top 2" in line and "--tune" in line


def test_float32_is_not_what_was_measured() -> None:
    kernels = TritonExpertKernels(DEVICE, False, TABLE, SHARED_BYTES, "a GPU")
    assert plans_of(kernels, need_of(4, torch.float32)) == heuristic_plans(SHAPE, True, SHARED_BYTES, True)


def test_a_table_comes_back_from_its_file() -> None:
    assert read_table(msgspec.json.encode(TABLE)) == TABLE
    with pytest.raises(ConfigError, match="a table of kernel tiles that cannot be read"):
        read_table(b'{"gpu": 1}')
