"""Finds the fastest tiles of the expert kernels for a shape on this GPU: `tokenspeed bench kernels --tune`.

Each matrix is timed alone over several layers of distinct weights and uniformly random routing, in a CUDA graph; a tile
counts only when its result agrees with plain torch. Workers compile every tile first, side by side. A plan for T tokens
reaches to the geometric middle between T and the next count; steps larger than any count keep the plans they had.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from tokenspeed.bench.expert_inputs import random_routing
from tokenspeed.bench.expert_tiles import block_ms, tiles_to_try, ways
from tokenspeed.bench.expert_truth import ExpertLayer, make_layers
from tokenspeed.kernels.registry import Need
from tokenspeed.kernels.triton import moe_experts
from tokenspeed.kernels.triton.moe_align import Grouping
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, GroupedTile
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import Fp16Tile, half_rows, half_scale, in_order
from tokenspeed.kernels.triton.moe_mxfp4_mma import HIGH, LOW, MmaTile, SplitRows, hidden_scale, split_rows
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    AnyTile,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    Fp16Tiles,
    MmaTiles,
    ShapePlans,
    choose,
    read_table,
    table_name,
)
from tokenspeed.kernels.triton.moe_steps import FP16, MMA, Steps, steps_of
from tokenspeed.moe.interface import Activation, MoeNeed, Routing
from tokenspeed.protocol.errors import ConfigError

MAX_GEMV_TOKENS = 8
NUM_LAYERS = 4
CALLS = 8
"""In a graph."""
WIDE_PARTS_TOKENS = 256
MAX_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Timed:
    """One tile of one matrix at a number of tokens."""

    tile: AnyTile
    time_us: float
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens and their experts, of every call in a graph, and the kind of kernels. `rows`: x as these take it."""

    count: int
    block_m: int
    steps: Steps[Any, Any, Any]
    x: list[torch.Tensor]
    routings: list[Routing]
    groupings: list[Grouping]
    rows: list[Any]


def compile_all(needs: list[MoeNeed], tokens: tuple[int, ...], num_workers: int | None = None) -> int:
    """Compile every candidate in processes of their own, into Triton's cache on disk; returns how many did.

    The workers only ask which GPU it is, and kernels do not depend on the number of experts."""
    jobs = {
        (
            replace(need, num_experts=need.top_k),
            block_m,
            tile,
            is_up,
            need.dtype if is_up else _parts_dtype(need, count),
        )
        for need in needs
        for count in tokens
        for block_m in block_ms(ExpertShape.of(need), count)
        for is_up in (True, False)
        for fp16 in ways(need, block_m)
        for tile in tiles_to_try(need, count, block_m, is_up, fp16)
    }
    context = multiprocessing.get_context("spawn")
    workers = num_workers or max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        done = [pool.submit(_compile, *job) for job in jobs]
        return len([one for one in done if one.result() is None])


def _parts_dtype(need: MoeNeed, count: int) -> torch.dtype:
    return torch.float32 if count <= WIDE_PARTS_TOKENS else need.dtype


def _compile(need: MoeNeed, block_m: int, tile: AnyTile, is_up: bool, out_dtype: torch.dtype) -> str | None:
    try:
        steps_of(tile).warm_up(need, block_m, tile, is_up, out_dtype)
    except Exception as error:  # a tile that does not compile is not a candidate
        return f"{type(error).__name__}: {error}"
    return None


class ExpertTuner:
    """Times candidates for one shape.

    Args:
        deadline: of `time.monotonic()`; counts that it does not reach are left out.
        log: gets one line for each result.
    """

    def __init__(
        self, need: MoeNeed, kernels: TritonExpertKernels, device: torch.device, deadline: float,
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._need, self._device = need, device
        self._deadline, self._log = deadline, log
        self._shape = ExpertShape.of(need)
        self._layers = make_layers(need, kernels, NUM_LAYERS, device)
        self._before = self._layers[0].experts.plans

    def tune(self, tokens: tuple[int, ...]) -> ShapePlans:
        """Plans for these counts, rising, fewer when the time is over; then those that engines have for larger steps.

        Raises:
            RuntimeError: no candidate gave a right result in time for any count.
        """
        found: list[ExpertPlan] = []
        for count in tokens:
            if time.monotonic() > self._deadline:
                self._log(f"{count} tokens: not reached in time")
                break
            plan = self._tune_count(count)
            if plan is not None:
                found.append(plan)
        if not found:
            raise RuntimeError("no tile of the expert kernels could be measured in the time given")
        versions = f"torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}"
        measured = f"{versions}, {found[0].max_tokens} to {found[-1].max_tokens} tokens"
        return ShapePlans(self._shape, measured, tuple(_spread(found, self._before)))

    def _tune_count(self, count: int) -> ExpertPlan | None:
        routings = [random_routing(self._need, count, self._device) for _ in range(CALLS)]
        x = [torch.randn(count, self._need.hidden_size, device=self._device).to(self._need.dtype) for _ in routings]
        best: tuple[float, ExpertPlan] | None = None

        def consider(plan: ExpertPlan, what: str) -> None:
            nonlocal best
            time_us = self._time_plan(x, routings, plan)
            self._log(f"{count} tokens, {what}: {time_us:.1f} us for the whole op")
            if best is None or time_us < best[0]:
                best = time_us, plan

        for block_m in block_ms(self._shape, count):
            for fp16 in ways(self._need, block_m):
                steps = steps_of(next(tiles_to_try(self._need, count, block_m, True, fp16)))
                grouped = [
                    steps.group(rows, routing.expert_ids, self._need.num_experts, block_m)
                    for rows, routing in zip(x, routings, strict=True)
                ]
                groupings, rows = [first for first, _ in grouped], [second for _, second in grouped]
                inputs = Inputs(count, block_m, steps, x, routings, groupings, rows)
                ups, downs = self._time_up(inputs), self._time_down(inputs)
                if ups is not None and downs is not None:
                    is_wide = _parts_dtype(self._need, count) == torch.float32
                    plan = _plan(count, block_m, ups.tile, downs.tile, is_wide)
                    consider(plan, f"block_m {block_m}{' float16' if fp16 else ''}")
        if count <= MAX_GEMV_TOKENS and self._need.format == "dense":
            consider(ExpertPlan(count, gemv=True), "gemv")
        consider(replace(choose(self._before, count), max_tokens=count), "as engines do now")
        if best is None:
            return None
        self._log(f"{count} tokens, winner: {best[0]:.1f} us for the whole op, {best[1]}")
        return best[1]

    def _layer(self, call: int) -> ExpertLayer:
        return self._layers[call % len(self._layers)]

    def _tiles(self, inputs: Inputs, is_up: bool) -> Iterator[AnyTile]:
        return tiles_to_try(self._need, inputs.count, inputs.block_m, is_up, inputs.steps is FP16)

    def _matrices(self, inputs: Inputs, is_up: bool) -> list[ExpertMatrix]:
        """One for each call."""
        layers = [self._layer(i) for i in range(len(inputs.x))]
        return [layer.gate_up if is_up else layer.down for layer in layers]

    def _time_up(self, inputs: Inputs) -> Timed | None:
        routings, groupings = inputs.routings, inputs.groupings
        truth = self._layer(0).hidden_truth(inputs.x[0], routings[0], groupings[0], self._need)
        activation, top_k = self._need.activation, self._need.top_k
        matrices = self._matrices(inputs, True)
        best: Timed | None = None
        for tile in self._tiles(inputs, True):

            def call(i: int, tile: AnyTile = tile) -> torch.Tensor | SplitRows:
                h: torch.Tensor | SplitRows = inputs.steps.gate_up(
                    inputs.rows[i], matrices[i], groupings[i], top_k, activation, tile
                )
                return h

            best = self._best(best, "gate_up", call, truth, inputs, tile)
        return best

    def _time_down(self, inputs: Inputs) -> Timed | None:
        routings, groupings = inputs.routings, inputs.groupings
        kind, width = _parts_dtype(self._need, inputs.count), self._need.intermediate_size
        h = [
            torch.randn(one.pairs.shape[0], width, device=self._device).to(self._need.dtype) for one in groupings
        ]  # fmt: skip
        truth = self._layer(0).part_truth(h[0], routings[0], groupings[0])
        matrices = self._matrices(inputs, False)
        activation = self._need.activation
        hidden = [_hidden(one, activation, inputs.steps) for one in h]
        best: Timed | None = None
        for tile in self._tiles(inputs, False):

            def call(i: int, tile: AnyTile = tile) -> torch.Tensor:
                return inputs.steps.down(
                    hidden[i], matrices[i], groupings[i], routings[i].weights, activation, kind, tile
                )  # fmt: skip

            best = self._best(best, "down", call, truth, inputs, tile)
        return best

    def _best(
        self, best: Timed | None, matrix: str, call: Callable[[int], torch.Tensor | SplitRows], truth: torch.Tensor,
        inputs: Inputs, tile: AnyTile,
    ) -> Timed | None:  # fmt: skip
        if time.monotonic() > self._deadline:
            return best
        what = f"{inputs.count} tokens, {matrix}, block_m {inputs.block_m}, {tile}"
        try:
            out = self._plain(call(0), matrix, tile)
            error = float((out - truth).norm() / truth.norm())
            if not error < MAX_ERROR:
                self._log(f"WRONG {what}: error {error:.3g}")
                return best
            time_us = self._graph_us(call)
        except Exception as error:  # does not compile or fit here
            self._log(f"FAILED {what}: {type(error).__name__} {str(error)[:120]}")
            return best
        num_bytes, flop = self._work(matrix, inputs)
        timed = Timed(tile, time_us, num_bytes / time_us / 1e3, flop / time_us / 1e6)
        self._log(f"{what}: {time_us:.1f} us, {timed.gb_per_s:.0f} GB/s, {timed.tflop_per_s:.1f} TFLOP/s")
        return timed if best is None or time_us < best.time_us else best

    def _plain(self, found: torch.Tensor | SplitRows, matrix: str, tile: AnyTile) -> torch.Tensor:
        """A result in float32, in the form of the truth."""
        if isinstance(found, SplitRows):
            return found.joined(hidden_scale(self._need.activation))
        if matrix == "down":
            return found.float().sum(0)
        if isinstance(tile, Fp16Tile):
            return in_order(found).float() / half_scale(self._need.activation)
        return found.float()

    def _work(self, matrix: str, inputs: Inputs) -> tuple[float, float]:
        """Bytes of the distinct experts' weights, and operations, of a call on average."""
        elements = self._need.hidden_size * self._need.intermediate_size * (2 if matrix == "gate_up" else 1)
        routings = inputs.routings
        distinct = sum(int((one.expert_ids.flatten().bincount() > 0).sum()) for one in routings) / len(routings)
        per_value = {"dense": float(self._need.dtype.itemsize), "mxfp4": 17 / 32, "fp8_block": 1.0}
        return distinct * elements * per_value[self._shape.format], 2.0 * elements * routings[0].expert_ids.numel()

    def _time_plan(self, x: list[torch.Tensor], routings: list[Routing], plan: ExpertPlan) -> float:
        def call(i: int) -> torch.Tensor:
            experts: TritonExperts = self._layer(i).experts
            experts.plans = (replace(plan, max_tokens=NO_LIMIT),)
            return experts(x[i], routings[i])

        return self._graph_us(call)

    def _graph_us(self, call: Callable[[int], torch.Tensor | SplitRows]) -> float:
        """Microseconds of a call in a graph of `CALLS`; the best of three replays after one."""
        for i in range(CALLS):
            call(i)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(i)
        times: list[float] = []
        for _ in range(4):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            started.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize(self._device)
            times.append(float(started.elapsed_time(ended)) * 1e3 / CALLS)
        return min(times[1:])


def _plan(count: int, block_m: int, up: AnyTile, down: AnyTile, is_wide: bool) -> ExpertPlan:
    if isinstance(up, MmaTile) and isinstance(down, MmaTile):
        return ExpertPlan(count, block_m=block_m, wide_parts=is_wide, mma=MmaTiles(up, down))
    if isinstance(up, Fp16Tile) and isinstance(down, Fp16Tile):
        return ExpertPlan(count, block_m=block_m, wide_parts=is_wide, fp16=Fp16Tiles(up, down))
    assert isinstance(up, GroupedTile) and isinstance(down, GroupedTile), "both matrices go by one way"
    return ExpertPlan(count, False, block_m, up, down, is_wide)


def _hidden(h: torch.Tensor, activation: Activation, steps: Steps[Any, Any, Any]) -> torch.Tensor | SplitRows:
    """h as these kernels' `gate_up` gives it."""
    if steps is MMA:
        return _split_hidden(h, activation)
    return _half_hidden(h, activation) if steps is FP16 else h


def _split_hidden(h: torch.Tensor, activation: Activation) -> SplitRows:
    scale = hidden_scale(activation)
    if scale == 0:
        return split_rows(h)
    wide = h.float() * scale
    high = wide.to(HIGH)
    return SplitRows(high, (wide - high.float()).to(LOW), None)


def _half_hidden(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    rows = half_rows(h)
    return (rows.values.float() * (rows.inverse * half_scale(activation))[:, None]).half()


def _spread(plans: list[ExpertPlan], before: tuple[ExpertPlan, ...]) -> Iterator[ExpertPlan]:
    """Each plan up to the geometric middle to the next, the last one as far as the plan `before` of its count went;
    those for more tokens follow. Tiles that are best for 32 tokens would be a disaster for a prompt."""
    for plan, following in pairwise(plans):
        yield replace(plan, max_tokens=max(plan.max_tokens, math.isqrt(plan.max_tokens * following.max_tokens)))
    reach = max(plans[-1].max_tokens, choose(before, plans[-1].max_tokens).max_tokens)
    yield replace(plans[-1], max_tokens=reach)
    yield from (plan for plan in before if plan.max_tokens > reach)


def tune_to_file(
    need: MoeNeed, tokens: tuple[int, ...], time_limit: float | None, path: str | None, where: Need
) -> None:
    """Tune one shape, print what was measured and write the table; other shapes in the file stay.

    Raises:
        ConfigError: our kernels do not serve these experts here, or nothing could be measured.
    """
    deadline = time.monotonic() + (time_limit or math.inf)
    (ours,) = [one for one in moe_experts.IMPLEMENTATIONS if one.op == "experts"]
    reason = ours.why_not(where)
    if reason is None and torch.cuda.get_device_capability(where.device) < (9, 0):
        reason = "candidates are declared for Hopper and later"
    if reason is None:
        kernels: TritonExpertKernels = ours.make(where)
        reason = kernels.why_not(need) or (kernels.why_no_mma(need) if need.format == "mxfp4" else None)
    if reason is not None:
        raise ConfigError(f"--tune: {reason}")
    print(f"compiled {compile_all([need], tokens)} tiles", flush=True)
    try:
        entry = ExpertTuner(need, kernels, where.device, deadline, print).tune(tokens)
    except RuntimeError as error:
        raise ConfigError(f"--tune: {error}; give a longer --time-limit") from error
    gpu = torch.cuda.get_device_name(where.device)
    file = Path(path or table_name(gpu))
    before = read_table(file.read_bytes()).experts if file.is_file() else ()
    others = [one for one in before if one.shape != entry.shape]
    table = ExpertTable(gpu, (*others, entry))
    file.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    print(f"written: {file}")
    print(msgspec.json.encode(entry).decode())
