"""Which kernels and tiles run experts at a number of tokens: from a table measured on this GPU, else by a heuristic.

A table is `tables/<GPU>.json`, written by `tokenspeed bench kernels --tune`. It is keyed by shape; a plan holds for all
token counts up to its `max_tokens` that no smaller plan covers, the last one for everything above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources

import msgspec

from tokenspeed.kernels.triton.moe_grouped import GroupedTile
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import Fp16Tile
from tokenspeed.kernels.triton.moe_mxfp4_mma import MmaTile
from tokenspeed.moe.interface import ExpertFormat, MoeNeed
from tokenspeed.protocol.errors import ConfigError

AnyTile = GroupedTile | MmaTile | Fp16Tile
MAX_GEMV_TOKENS = 8
"""Without a table, dense experts: up to where the GEMV won for Qwen3-30B-A3B on an H200."""
DEFAULT_TILE = GroupedTile()
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What a plan depends on besides the number of tokens; sizes of one rank."""

    format: ExpertFormat
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @staticmethod
    def of(need: MoeNeed) -> ExpertShape:
        return ExpertShape(need.format, need.num_experts, need.top_k, need.hidden_size, need.intermediate_size)


@dataclass(frozen=True, slots=True)
class MmaTiles:
    """Of `moe_mxfp4_mma`, one for each matrix."""

    gate_up: MmaTile
    down: MmaTile


@dataclass(frozen=True, slots=True)
class Fp16Tiles:
    """Of `moe_mxfp4_fp16`, one for each matrix."""

    gate_up: Fp16Tile
    down: Fp16Tile


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Up to `max_tokens`: the kernels of `moe_gemv`, or pairs in tiles of `block_m` with a tile for each matrix.

    wide_parts: what experts give is kept in float32 until it is summed, not in the model's dtype.
    mma: the kernels of `moe_mxfp4_mma` with these tiles, in place of `gate_up` and `down`.
    fp16: likewise of `moe_mxfp4_fp16`.
    """

    max_tokens: int
    gemv: bool = False
    block_m: int = 16
    gate_up: GroupedTile = DEFAULT_TILE
    down: GroupedTile = DEFAULT_TILE
    wide_parts: bool = True
    mma: MmaTiles | None = None
    fp16: Fp16Tiles | None = None

    @property
    def tiles(self) -> tuple[AnyTile, AnyTile]:
        """Of gate and up, and of down; their kind says which kernels run. Not for the kernels of `moe_gemv`."""
        chosen = self.mma or self.fp16 or self
        return chosen.gate_up, chosen.down


@dataclass(frozen=True, slots=True)
class ShapePlans:
    """Plans by rising `max_tokens`. `measured`: with which versions, and when."""

    shape: ExpertShape
    measured: str
    plans: tuple[ExpertPlan, ...]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """One file."""

    gpu: str
    experts: tuple[ShapePlans, ...] = ()

    def find(self, shape: ExpertShape) -> ShapePlans | None:
        return next((entry for entry in self.experts if entry.shape == shape), None)


def table_name(gpu: str) -> str:
    """File name of a GPU by the name that torch gives it: `NVIDIA_H200.json`."""
    return gpu.strip().replace(" ", "_").replace("/", "_") + ".json"


def load_table(gpu: str) -> ExpertTable | None:
    """The shipped table of a GPU, or None."""
    file = resources.files("tokenspeed.kernels.triton").joinpath("tables", table_name(gpu))
    return read_table(file.read_bytes()) if file.is_file() else None


def read_table(content: bytes) -> ExpertTable:
    """
    Raises:
        ConfigError: it is no table.
    """
    try:
        return msgspec.json.decode(content, type=ExpertTable)
    except msgspec.DecodeError as error:
        raise ConfigError(f"a table of kernel tiles that cannot be read: {error}") from error


def choose(plans: tuple[ExpertPlan, ...], num_tokens: int) -> ExpertPlan:
    """The first plan that reaches so far, or the last."""
    for plan in plans:
        if num_tokens <= plan.max_tokens:
            return plan
    return plans[-1]


SMALL_UP = MmaTile(64, 1, 4, 4, True, 4)
SMALL_DOWN = MmaTile(128, 1, 3, 4, True, 2)
WIDE_TILE = MmaTile(128, 1, 3, 4, False, 2)
LARGE_TILES = MmaTiles(MmaTile(64, 1, 3, 4, False, 1), MmaTile(128, 1, 3, 4, False, 1, 1, 2))
MMA_PLANS = (
    # Tokens, pairs an expert gets on average (the larger count holds), pairs a tile, tiles.
    (1, 0.0, 8, MmaTiles(MmaTile(64, 1, 6, 4, True, 4), MmaTile(64, 1, 4, 4, True, 4, 2))),
    (2, 0.0, 8, MmaTiles(SMALL_DOWN, MmaTile(64, 1, 6, 4, True, 4))),
    (5, 0.0, 8, MmaTiles(SMALL_UP, SMALL_DOWN)),
    (11, 0.0, 8, MmaTiles(MmaTile(64, 1, 4, 4, True, 2), SMALL_UP)),
    (22, 2.75, 8, MmaTiles(MmaTile(64, 2, 3, 4, True, 4), MmaTile(64, 1, 3, 4, True, 4))),
    (45, 5.625, 8, MmaTiles(MmaTile(64, 2, 3, 4, True, 4), SMALL_DOWN)),
    (112, 14.0, 16, MmaTiles(MmaTile(128, 1, 4, 4, False, 2), SMALL_DOWN)),
    (512, 64.0, 32, MmaTiles(WIDE_TILE, WIDE_TILE)),
)
"""The fastest of a sweep for gpt-oss-20b on an H200 (32 experts, top 4, 2880 x 2880; docs/log.md), at 1, 2, 4, 8, 16,
32, 64 and 256 tokens, each to the geometric middle but for the tiles of 16, which lose from 16 pairs an expert on.
`LARGE_TILES` were at 1024."""
FP16_PAIRS = 14
"""An expert gets, above which `moe_mxfp4_fp16` is faster. Measured for 32 and 128 experts: with 16 it is, by a tenth;
with 12 and with 8 it is slower by a twentieth."""
FP16_PLANS = (
    # Tokens, pairs an expert gets on average, pairs a tile, tile of both matrices.
    (320, 40.0, 32, Fp16Tile(128, 4, 4, 1, False, 8)),
    (NO_LIMIT, 0.0, 128, Fp16Tile(128, 5, 8, 4, True, 32, 128)),
)
"""The fastest of a sweep as above at 256 tokens, and at 1024, 2048 and 8000, but for 1 percent: 4 programs fewer to
compile. From one to the other at 40 pairs an expert: 32 are 5 percent quicker by the first, 48 are 11 by the second.
For the shape of the sweep `mma_plans` gives what the table of an H200 has, so that whoever measures anew changes both;
a test holds them together."""


def mma_plans(shape: ExpertShape, has_fp16: bool) -> tuple[ExpertPlan, ...]:
    """Plans of `moe_mxfp4_mma` and `moe_mxfp4_fp16` for a shape without a table: a few tokens by their number, because
    each has experts of its own; more by what an expert gets of them.

    Args:
        has_fp16: the latter serves these experts.
    """
    plans: list[ExpertPlan] = []

    def add(tokens: int, pairs: float, plan: ExpertPlan) -> None:
        limit = max(tokens, int(pairs * shape.num_experts / shape.top_k))
        if not plans or limit > plans[-1].max_tokens:
            plans.append(replace(plan, max_tokens=limit))

    for tokens, pairs, block_m, tiles in MMA_PLANS:
        if pairs <= FP16_PAIRS or not has_fp16:
            add(tokens, pairs, ExpertPlan(tokens, block_m=block_m, mma=tiles))
    if has_fp16:
        for tokens, pairs, block_m, half in FP16_PLANS:
            plan = ExpertPlan(tokens, block_m=block_m, wide_parts=False, fp16=Fp16Tiles(half, half))
            add(tokens, pairs, plan)
        return tuple(plans)
    return (*plans, ExpertPlan(NO_LIMIT, block_m=64, wide_parts=False, mma=LARGE_TILES))


def heuristic_plans(
    shape: ExpertShape,
    has_gemv: bool,
    shared_bytes: int,
    is_float32: bool,
    has_mma: bool = False,
    has_fp16: bool = False,
) -> tuple[ExpertPlan, ...]:
    """Plans for a shape without a table. Not measured: tiles of pairs about twice what an expert gets on average, so
    that most experts take one tile; large tiles where the GPU has Hopper's shared memory for them.

    Args:
        shared_bytes: that one program may have.
        is_float32: activations (and dense weights) take 4 bytes.
        has_mma: `moe_mxfp4_mma` serves these experts.
        has_fp16: `moe_mxfp4_fp16` does too.
    """
    if has_mma:
        return mma_plans(shape, has_fp16)
    gemv_tokens = MAX_GEMV_TOKENS if has_gemv else 0
    plans = [ExpertPlan(gemv_tokens, gemv=True)] if gemv_tokens else []
    if is_float32:
        tile = GroupedTile(64, 32, 1, 2, 4)
        return (*plans, ExpertPlan(64, False, 16, tile, tile), ExpertPlan(NO_LIMIT, False, 32, tile, tile))
    is_large = shared_bytes >= 200 * 1024
    small = GroupedTile(128, 64 if shape.format == "dense" else 128, stages=4 if is_large else 2)
    per_expert = shape.top_k / shape.num_experts
    for block_m in (16, 32):
        plans.append(ExpertPlan(max(gemv_tokens + 1, int(block_m / 2 / per_expert)), False, block_m, small, small))
    middle = GroupedTile(128, 64, 1, 3 if is_large else 2, 8 if shape.format == "fp8_block" else 4, 4)
    plans.append(ExpertPlan(max(64, int(40 / per_expert)), False, 64, middle, middle))
    if is_large:
        wide = 128 if shape.format == "fp8_block" else 256
        large = GroupedTile(wide, 64, 1, 3, 8, 8)
        plans.append(ExpertPlan(NO_LIMIT, False, 128, large, large, wide_parts=False))
    else:
        plans.append(ExpertPlan(NO_LIMIT, False, 64, middle, middle, wide_parts=False))
    return tuple(plans)
