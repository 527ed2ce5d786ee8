"""Finds the fastest tiles of the expert kernels for a shape on this GPU: `tokenspeed bench kernels --tune`.

Each matrix is timed alone over several layers of distinct weights and uniformly random routing, in a CUDA graph; a tile
counts only when its result agrees with plain torch. Workers compile every tile first, side by side. A plan for T tokens
reaches to the geometric middle between T and the next count.
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

import msgspec
import torch
import triton

from tokenspeed.bench.expert_inputs import random_routing
from tokenspeed.bench.expert_truth import ExpertLayer, make_layers
from tokenspeed.kernels.registry import Need
from tokenspeed.kernels.triton import moe_experts
from tokenspeed.kernels.triton.moe_align import Grouping, group_pairs
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import (
    ExpertMatrix,
    GroupedTile,
    grouped_down,
    grouped_gate_up,
    warm_up_grouped,
)
from tokenspeed.kernels.triton.moe_mxfp4_mma import (
    HIGH,
    LOW,
    MmaTile,
    SplitRows,
    hidden_scale,
    mma_down,
    mma_gate_up,
    split_rows,
    warm_up_mma,
)
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    MmaTiles,
    ShapePlans,
    read_table,
    table_name,
)
from tokenspeed.kernels.triton.moe_widen import num_values, widen
from tokenspeed.moe.interface import Activation, ExpertFormat, MoeNeed, Routing
from tokenspeed.protocol.errors import ConfigError

MAX_GEMV_TOKENS = 8
NUM_LAYERS = 4
CALLS = 8
"""In a graph."""
WIDE_PARTS_TOKENS = 256
WIDEN_TOKENS = 1024
"""From here on MXFP4 is also tried widened first: below, that alone takes longer than the products."""
MAX_ERROR = 1e-2
MIN_TMA_TOKENS = 4096
"""A launch with the copy engine describes its matrix anew, on the host, which a graph does not show: a prompt of 1024
tokens took 60 ms with it where it had taken 33 (docs/log.md)."""


AnyTile = GroupedTile | MmaTile


@dataclass(frozen=True, slots=True)
class Timed:
    """One tile of one matrix at a number of tokens."""

    tile: AnyTile
    time_us: float
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens and their experts, of every call in a graph. `widened`: MXFP4 by way of `moe_widen`; `rows`: x split, for
    `moe_mxfp4_mma`."""

    count: int
    block_m: int
    widened: bool
    x: list[torch.Tensor]
    routings: list[Routing]
    groupings: list[Grouping]
    rows: list[SplitRows]


def tile_candidates(format: ExpertFormat, block_m: int, is_up: bool) -> Iterator[AnyTile]:
    """Tiles worth a try: those that neither spill registers nor overrun Hopper's 227 KiB of shared memory. MXFP4 gets
    those of `moe_mxfp4_mma`."""
    if format == "mxfp4":
        yield from _mma_tiles(block_m, is_up)
        return
    if block_m <= 32:
        yield from _small_tiles(format, is_up)
        return
    middle = {
        "dense": [(128, 64, 4, 4), (256, 64, 3, 8), (256, 64, 4, 8), (128, 128, 3, 4), (128, 64, 3, 8)],
        "fp8_block": [(128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 3, 4)],
    }
    large = {
        "dense": [(256, 64, 4, 8), (256, 64, 3, 8), (128, 64, 4, 8), (128, 64, 3, 4)],
        "fp8_block": [(128, 128, 3, 8), (128, 128, 2, 8)],
    }
    for block_n, block_k, stages, warps in (middle if block_m == 64 else large)[format]:
        for group_m in (4, 8) if block_m == 64 else (8, 16):
            yield GroupedTile(block_n, block_k, 1, stages, warps, group_m)
    if format == "dense":
        for block_n, warps in ((256, 8), (128, 8)) if block_m == 128 else ((256, 8), (128, 4)):
            yield GroupedTile(block_n, 64, 1, 4, warps, 8, tma=True)


def _small_tiles(format: ExpertFormat, is_up: bool) -> Iterator[GroupedTile]:
    sizes = {
        "dense": [(128, 64, 6, 4), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 6, 4), (128, 128, 3, 4), (64, 128, 3, 4)],
        "fp8_block": [(128, 128, 4, 8), (128, 128, 3, 4), (128, 128, 4, 4), (64, 128, 4, 4)],
    }
    tiles = [GroupedTile(block_n, block_k, 1, stages, warps) for block_n, block_k, stages, warps in sizes[format]]
    yield from tiles
    yield replace(tiles[0], group_m=2)
    if not is_up:
        yield replace(tiles[0], prefetch_lines=4)
        yield replace(tiles[0], split_k=2)


def _mma_tiles(block_m: int, is_up: bool) -> Iterator[MmaTile]:
    """The better half of a sweep of gpt-oss-20b's layer."""
    if block_m <= 16:
        tiles = [
            *(MmaTile(64, 1, stages, 4, True, 4) for stages in (3, 4, 6)),
            *(MmaTile(64, 2, 3, 4, True, 4), MmaTile(64, 1, 4, 4, True, 2), MmaTile(64, 1, 4, 4, False, 4)),
            *(MmaTile(128, 1, 3, 4, True, 2), MmaTile(128, 1, 4, 4, False, 2)),
        ]
        yield from tiles
        if not is_up:
            # Few rows leave SMs without work.
            for tile in (tiles[1], tiles[5]):
                yield replace(tile, split_k=2)
    elif block_m == 32:
        yield from (MmaTile(64, 1, 4, 4, True, 4), MmaTile(64, 1, 4, 4, False, 2), MmaTile(64, 1, 3, 4, False, 4))
        yield from (MmaTile(128, 1, 3, 4, False, 2), MmaTile(128, 1, 3, 4, False, 1), MmaTile(128, 1, 4, 8, False, 4))
    else:
        for group_m in (1, 2 if block_m == 64 else 4):
            yield MmaTile(64, 1, 3, 4, False, 1, 1, group_m)
            yield MmaTile(64 if block_m == 64 else 128, 1, 3, 4 if block_m == 64 else 8, False, 2, 1, group_m)
            if block_m == 64:
                yield MmaTile(128, 1, 3, 4, False, 1, 1, group_m)


def widened_candidates(block_m: int) -> Iterator[GroupedTile]:
    """Tiles for MXFP4 that is widened first: the fastest of dense ones in large prompts, and the copy engine."""
    if block_m < 128:
        yield GroupedTile(256, 64, 1, 4, 8, 8)
        yield GroupedTile(128, 64, 1, 4, 4, 8)
        yield GroupedTile(256, 64, 1, 4, 8, 8, tma=True)
        yield GroupedTile(128, 64, 1, 4, 4, 8, tma=True)
        return
    for group_m in (8, 16):
        yield GroupedTile(256, 64, 1, 4, 8, group_m)
        yield GroupedTile(256, 64, 1, 4, 8, group_m, tma=True)
    yield GroupedTile(128, 64, 1, 4, 8, 8, tma=True)


def block_ms(shape: ExpertShape, num_tokens: int) -> tuple[int, ...]:
    """Pairs a tile: around what an expert gets."""
    mean = num_tokens * shape.top_k / shape.num_experts
    if shape.format == "mxfp4" and mean <= 12:
        return (8,) if mean <= 3 else (8, 16)
    if mean <= 6:
        return (16,)
    if mean <= 20:
        return (16, 32)
    if mean <= 48:
        return (32, 64)
    return (64, 128) if mean <= 256 else (128,)


def compile_all(needs: list[MoeNeed], tokens: tuple[int, ...], num_workers: int | None = None) -> int:
    """Compile every candidate in processes of their own, into Triton's cache on disk; returns how many did.

    The workers only ask which GPU it is, and kernels do not depend on the number of experts."""
    jobs = {
        (
            replace(form, num_experts=form.top_k),
            block_m,
            tile,
            is_up,
            form.dtype if is_up else _parts_dtype(need, count),
        )
        for need in needs
        for count in tokens
        for block_m in block_ms(ExpertShape.of(need), count)
        for is_up in (True, False)
        for form, tiles in _candidates(need, count, block_m, is_up)
        for tile in tiles
    }
    context = multiprocessing.get_context("spawn")
    workers = num_workers or max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        done = [pool.submit(_compile, *job) for job in jobs]
        return len([one for one in done if one.result() is None])


def _candidates(need: MoeNeed, count: int, block_m: int, is_up: bool) -> Iterator[tuple[MoeNeed, Iterator[AnyTile]]]:
    """Tiles with the layer as the kernel sees it."""
    yield need, _launchable(tile_candidates(need.format, block_m, is_up), count)
    if may_widen(need, count, block_m):
        yield replace(need, format="dense"), _launchable(widened_candidates(block_m), count)


def _launchable(tiles: Iterator[AnyTile], count: int) -> Iterator[AnyTile]:
    return (tile for tile in tiles if isinstance(tile, MmaTile) or not tile.tma or count >= MIN_TMA_TOKENS)


def may_widen(need: MoeNeed, count: int, block_m: int) -> bool:
    """Where widening every weight once may be less work than widening them for each tile."""
    return need.format == "mxfp4" and count >= WIDEN_TOKENS and block_m >= 64


def _parts_dtype(need: MoeNeed, count: int) -> torch.dtype:
    return torch.float32 if count <= WIDE_PARTS_TOKENS else need.dtype


def _compile(need: MoeNeed, block_m: int, tile: AnyTile, is_up: bool, out_dtype: torch.dtype) -> str | None:
    try:
        if isinstance(tile, MmaTile):
            warm_up_mma(need, block_m, tile, is_up, out_dtype)
        else:
            warm_up_grouped(need, block_m, tile, is_up, out_dtype)
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

    def tune(self, tokens: tuple[int, ...]) -> ShapePlans:
        """Plans for these counts, rising; fewer when the time is over.

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
        measured = f"torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}"
        return ShapePlans(self._shape, measured, tuple(_spread(found)))

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
            groupings = [group_pairs(one.expert_ids, self._need.num_experts, block_m) for one in routings]
            for widened in (False, True) if may_widen(self._need, count, block_m) else (False,):
                is_split = self._shape.format == "mxfp4" and not widened
                rows = [split_rows(one) for one in x] if is_split else []
                inputs = Inputs(count, block_m, widened, x, routings, groupings, rows)
                ups, downs = self._time_up(inputs), self._time_down(inputs)
                if ups is not None and downs is not None:
                    is_wide = _parts_dtype(self._need, count) == torch.float32
                    plan = _plan(count, block_m, ups.tile, downs.tile, is_wide, widened)
                    consider(plan, f"block_m {block_m}{' widened' if widened else ''}")
        if count <= MAX_GEMV_TOKENS and self._need.format == "dense":
            consider(ExpertPlan(count, gemv=True), "gemv")
        if best is None:
            return None
        self._log(f"{count} tokens, winner: {best[0]:.1f} us for the whole op, {best[1]}")
        return best[1]

    def _layer(self, call: int) -> ExpertLayer:
        return self._layers[call % len(self._layers)]

    def _tiles(self, inputs: Inputs, is_up: bool) -> Iterator[AnyTile]:
        if inputs.widened:
            return _launchable(widened_candidates(inputs.block_m), inputs.count)
        return _launchable(tile_candidates(self._shape.format, inputs.block_m, is_up), inputs.count)

    def _matrices(self, inputs: Inputs, is_up: bool) -> list[ExpertMatrix]:
        """One for each call; widened ones are all of the first layer, far larger than what a GPU caches."""
        layers = [self._layer(i) for i in range(len(inputs.x))]
        matrices = [layer.gate_up if is_up else layer.down for layer in layers]
        if not inputs.widened:
            return matrices
        scratch = torch.empty(num_values(matrices[0]), dtype=self._need.dtype, device=self._device)
        time_us = self._graph_us(lambda i: widen(matrices[i], scratch, hopper=True).weight)
        moved = num_values(matrices[0]) * (17 / 32 + self._need.dtype.itemsize)
        self._log(f"{inputs.count} tokens, widening: {time_us:.1f} us, {moved / time_us / 1e3:.0f} GB/s")
        return [widen(matrices[0], scratch, hopper=True)] * len(matrices)

    def _time_up(self, inputs: Inputs) -> Timed | None:
        routings, groupings = inputs.routings, inputs.groupings
        truth = self._layer(0).hidden_truth(inputs.x[0], routings[0], groupings[0], self._need)
        activation, top_k = self._need.activation, self._need.top_k
        matrices = self._matrices(inputs, True)
        best: Timed | None = None
        for tile in self._tiles(inputs, True):

            def call(i: int, tile: AnyTile = tile) -> torch.Tensor | SplitRows:
                if isinstance(tile, MmaTile):
                    return mma_gate_up(inputs.rows[i], matrices[i], groupings[i], top_k, activation, tile)
                return grouped_gate_up(inputs.x[i], matrices[i], groupings[i], top_k, activation, tile)

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
        split = [_split_hidden(one, self._need.activation) for one in h] if inputs.rows else []
        best: Timed | None = None
        for tile in self._tiles(inputs, False):

            def call(i: int, tile: AnyTile = tile) -> torch.Tensor:
                if isinstance(tile, MmaTile):
                    weights = routings[i].weights
                    return mma_down(split[i], matrices[i], groupings[i], weights, self._need.activation, kind, tile)
                return grouped_down(h[i], matrices[i], groupings[i], routings[i].weights, kind, tile)

            best = self._best(best, "down", call, truth, inputs, tile)
        return best

    def _best(
        self, best: Timed | None, matrix: str, call: Callable[[int], torch.Tensor | SplitRows], truth: torch.Tensor,
        inputs: Inputs, tile: AnyTile,
    ) -> Timed | None:  # fmt: skip
        if time.monotonic() > self._deadline:
            return best
        widened = " widened" if inputs.widened else ""
        what = f"{inputs.count} tokens, {matrix}{widened}, block_m {inputs.block_m}, {tile}"
        try:
            found = call(0)
            out = found.joined(hidden_scale(self._need.activation)) if isinstance(found, SplitRows) else found.float()
            out = out.sum(0) if matrix == "down" else out
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

    def _work(self, matrix: str, inputs: Inputs) -> tuple[float, float]:
        """Bytes of the distinct experts' weights, and operations, of a call on average."""
        elements = self._need.hidden_size * self._need.intermediate_size * (2 if matrix == "gate_up" else 1)
        routings = inputs.routings
        distinct = sum(int((one.expert_ids.flatten().bincount() > 0).sum()) for one in routings) / len(routings)
        per_value = {"dense": float(self._need.dtype.itemsize), "mxfp4": 17 / 32, "fp8_block": 1.0}
        each = per_value["dense" if inputs.widened else self._shape.format]
        return distinct * elements * each, 2.0 * elements * routings[0].expert_ids.numel()

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


def _plan(count: int, block_m: int, up: AnyTile, down: AnyTile, is_wide: bool, widened: bool) -> ExpertPlan:
    if isinstance(up, MmaTile) and isinstance(down, MmaTile):
        return ExpertPlan(count, block_m=block_m, wide_parts=is_wide, mma=MmaTiles(up, down))
    assert isinstance(up, GroupedTile) and isinstance(down, GroupedTile), "both matrices go by one way"
    return ExpertPlan(count, False, block_m, up, down, is_wide, widened)


def _split_hidden(h: torch.Tensor, activation: Activation) -> SplitRows:
    """h as `mma_gate_up` gives it."""
    scale = hidden_scale(activation)
    if scale == 0:
        return split_rows(h)
    wide = h.float() * scale
    high = wide.to(HIGH)
    return SplitRows(high, (wide - high.float()).to(LOW), None)


def _spread(plans: list[ExpertPlan]) -> Iterator[ExpertPlan]:
    """Each plan up to the geometric middle to the next, the last without end."""
    for plan, following in pairwise(plans):
        yield replace(plan, max_tokens=max(plan.max_tokens, math.isqrt(plan.max_tokens * following.max_tokens)))
    yield replace(plans[-1], max_tokens=NO_LIMIT)


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
