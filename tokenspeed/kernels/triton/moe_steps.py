"""Experts by tiles of pairs, whichever kernels serve them: pairs grouped and x prepared, gate and up, down, the sum.

`moe_grouped`, `moe_mxfp4_mma` and `moe_mxfp4_fp16` are three kinds of the same steps; a plan's tiles say which. Another
kind is a tile, a `Steps` of it here, and a place in `moe_plans`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tokenspeed.kernels.triton.moe_align import Grouping, group_pairs
from tokenspeed.kernels.triton.moe_grouped import (
    ExpertMatrix,
    GroupedTile,
    combine,
    grouped_down,
    grouped_gate_up,
    warm_up_grouped,
)
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import (
    Fp16Tile,
    HalfRows,
    fp16_down,
    fp16_gate_up,
    half_rows,
    warm_up_fp16,
)
from tokenspeed.kernels.triton.moe_mxfp4_mma import MmaTile, group_and_split, mma_down, mma_gate_up, warm_up_mma
from tokenspeed.kernels.triton.moe_plans import AnyTile, ExpertPlan
from tokenspeed.moe.interface import Activation, MoeNeed, Routing

Rows = TypeVar("Rows")
Hidden = TypeVar("Hidden")
Tile = TypeVar("Tile")


@dataclass(frozen=True, slots=True)
class Steps(Generic[Rows, Hidden, Tile]):
    """One kind. T tokens, k experts each.

    group: x [T, H], expert_ids [T, k], experts, pairs a tile -> their grouping, and x as `gate_up` takes it.
    gate_up: that, matrix, grouping, k, activation, tile -> h of all pairs as `down` takes it.
    down: h, matrix, grouping, weights [T, k], activation, dtype, tile -> parts [splits, T * k, H], by pair, weighted.
    warm_up: need, pairs a tile, tile, whether it is gate and up, dtype of its result; compiles, launches nothing.
    hopper: see `moe_grouped`.
    """

    group: Callable[[torch.Tensor, torch.Tensor, int, int], tuple[Grouping, Rows]]
    gate_up: Callable[[Rows, ExpertMatrix, Grouping, int, Activation, Tile], Hidden]
    down: Callable[[Hidden, ExpertMatrix, Grouping, torch.Tensor, Activation, torch.dtype, Tile], torch.Tensor]
    warm_up: Callable[[MoeNeed, int, Tile, bool, torch.dtype], None]
    hopper: bool = True


def _grouped(hopper: bool) -> Steps[torch.Tensor, torch.Tensor, GroupedTile]:
    def group(
        x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, block_m: int
    ) -> tuple[Grouping, torch.Tensor]:
        return group_pairs(expert_ids, num_experts, block_m, hopper), x

    def gate_up(
        x: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, top_k: int, activation: Activation, tile: GroupedTile
    ) -> torch.Tensor:
        return grouped_gate_up(x, matrix, grouping, top_k, activation, tile, hopper)

    def down(
        h: torch.Tensor, matrix: ExpertMatrix, grouping: Grouping, weights: torch.Tensor, activation: Activation,
        dtype: torch.dtype, tile: GroupedTile,
    ) -> torch.Tensor:  # fmt: skip
        return grouped_down(h, matrix, grouping, weights, dtype, tile, hopper)

    return Steps(group, gate_up, down, warm_up_grouped, hopper)


def _group_and_halve(
    x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[Grouping, HalfRows]:
    return group_pairs(expert_ids, num_experts, block_m), half_rows(x)


GROUPED, GROUPED_ON_HOPPER = _grouped(False), _grouped(True)
MMA = Steps(group_and_split, mma_gate_up, mma_down, warm_up_mma)
FP16 = Steps(_group_and_halve, fp16_gate_up, fp16_down, warm_up_fp16)


def steps_of(tile: AnyTile, hopper: bool = True) -> Steps[Any, Any, Any]:
    """The kind that a tile is for."""
    if isinstance(tile, MmaTile):
        return MMA
    if isinstance(tile, Fp16Tile):
        return FP16
    return GROUPED_ON_HOPPER if hopper else GROUPED


def run_steps(
    steps: Steps[Any, Any, Any],
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    num_experts: int,
    activation: Activation,
    plan: ExpertPlan,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """All steps with the plan's tiles, for T >= 1 tokens; see `Experts.__call__`."""
    num_tokens, top_k = routing.expert_ids.shape
    up_tile, down_tile = plan.tiles
    grouping, rows = steps.group(x, routing.expert_ids, num_experts, plan.block_m)
    h = steps.gate_up(rows, gate_up, grouping, top_k, activation, up_tile)
    del rows  # a prompt's are large, and what comes now may lie there
    kind = torch.float32 if plan.wide_parts else x.dtype
    parts = steps.down(h, down, grouping, routing.weights, activation, kind, down_tile)
    return combine(parts, num_tokens, top_k, residual, x.dtype, steps.hopper)
