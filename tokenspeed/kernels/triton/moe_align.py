"""Groups the (token, expert) pairs of a step by expert, for the kernels of `moe_grouped` and `moe_mxfp4_mma`.

    expert_ids [T, k]  ->  pairs [T * k]: pair numbers t * k + j, by expert, within an expert ascending
                           tiles [3, max_tiles]: expert, first, end: tile i multiplies pairs[first : end) by that expert
                           |--------- expert 4 ---------|-- expert 9 --|
                           |BLOCK_M |BLOCK_M | rest     |BLOCK_M | rest|      expert = -1: nothing left

Formula   pairs = stable argsort of expert_ids; tiles of expert e: ceil(count[e] / BLOCK_M), side by side.
Bytes     4 P read, 4 P and 12 a tile written. Few pairs: every program reads all ids, P / 32 times 4 P, from L2. Many:
          ids three times, and 20 an expert and block of 256 pairs (counts written, read twice, placed, read).
Bound     8192 tokens of 4 of 32 experts: 0.6 MB, 0.15 us at 4.26 TB/s on an H200; the launches are the cost.

The host knows only bounds: at most min(P, E) + P // BLOCK_M tiles for P pairs. Nothing waits for the device. The order
depends on the ids alone. Few pairs take one launch, because a decode step waits for it, in which every program looks at
all ids; many take three: counts by block, their prefix sums and the tiles, places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.launch import ceil_div, power_of_2

MAX_SMALL_PAIRS = 1024
SMALL_SHARE = 32
SMALL_STEP = 32
SCATTER_BLOCK = 256
SCAN_BLOCKS = 64
TILE_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Grouping:
    """See the module. int32, in new buffers. `block_m`: pairs a tile has at most."""

    pairs: torch.Tensor
    tiles: torch.Tensor
    block_m: int

    @property
    def max_tiles(self) -> int:
        """Bound of the number of tiles; those left over have expert -1."""
        return self.tiles.shape[1]


@triton.jit
def _store_tiles(
    tiles_ptr, counts, pair_starts, max_tiles, start,
    BLOCK_M: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles [start, start + CHUNK) of the list, from every expert's count and first pair [E_BLOCK]."""
    experts = tl.arange(0, E_BLOCK)
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(num_tiles, axis=0)
    tile_starts = tile_ends - num_tiles
    pair_ends = pair_starts + counts
    tiles = start + tl.arange(0, CHUNK)
    is_mine = (tile_starts[None, :] <= tiles[:, None]) & (tiles[:, None] < tile_ends[None, :])
    expert = tl.sum(tl.where(is_mine, experts[None, :] + 1, 0), axis=1) - 1
    first = pair_starts[None, :] + (tiles[:, None] - tile_starts[None, :]) * BLOCK_M
    end = tl.minimum(first + BLOCK_M, pair_ends[None, :])
    inside = tiles < max_tiles
    tl.store(tiles_ptr + tiles, expert, mask=inside)
    tl.store(tiles_ptr + max_tiles + tiles, tl.sum(tl.where(is_mine, first, 0), axis=1), mask=inside)
    tl.store(tiles_ptr + 2 * max_tiles + tiles, tl.sum(tl.where(is_mine, end, 0), axis=1), mask=inside)


@triton.jit
def align_share(
    ids_ptr, pairs_ptr, tiles_ptr, program, num_pairs, max_tiles,
    BLOCK_M: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """A program places SHARE pairs and writes SHARE tiles, each from all the ids, so that none waits for another. A
    pair's place is the number of pairs before it, by (expert, pair). Sums over the ids are kept apart until the end:
    adding up across threads costs more than counting."""
    mine = program * SHARE + tl.arange(0, SHARE)
    ids = tl.load(ids_ptr + mine, mask=mine < num_pairs, other=E_BLOCK)
    experts = tl.arange(0, E_BLOCK)
    before = tl.zeros((SHARE, STEP), dtype=tl.int32)
    hits = tl.zeros((E_BLOCK, STEP), dtype=tl.int32)
    for start in range(0, num_pairs, STEP):
        others = start + tl.arange(0, STEP)
        other_ids = tl.load(ids_ptr + others, mask=others < num_pairs, other=E_BLOCK)
        is_before = (other_ids[None, :] < ids[:, None]) | (
            (other_ids[None, :] == ids[:, None]) & (others[None, :] < mine[:, None])
        )
        before += is_before.to(tl.int32)
        hits += (other_ids[None, :] == experts[:, None]).to(tl.int32)
    tl.store(pairs_ptr + tl.sum(before, axis=1), mine, mask=mine < num_pairs)
    counts = tl.sum(hits, axis=1)
    pair_starts = tl.cumsum(counts, axis=0) - counts
    _store_tiles(tiles_ptr, counts, pair_starts, max_tiles, program * SHARE, BLOCK_M, E_BLOCK, SHARE)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _align_small_kernel(
    ids_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    max_tiles,
    BLOCK_M: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    align_share(
        ids_ptr, pairs_ptr, tiles_ptr, tl.program_id(0), num_pairs, max_tiles, BLOCK_M, SHARE, STEP, E_BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Pairs of each expert in each block: counts [num_blocks, E_BLOCK]."""
    block = tl.program_id(0)
    mine = block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids = tl.load(ids_ptr + mine, mask=mine < num_pairs, other=E_BLOCK)
    experts = tl.arange(0, E_BLOCK)
    counts = tl.sum((ids[None, :] == experts[:, None]).to(tl.int32), axis=1)
    tl.store(counts_ptr + block * E_BLOCK + experts, counts)


@triton.jit(do_not_specialize=["num_blocks", "max_tiles"])
def _scan_kernel(
    counts_ptr,
    tiles_ptr,
    num_blocks,
    max_tiles,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts become first places, in place: of (block, expert) over all pairs in order. One program."""
    experts = tl.arange(0, E_BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros((E_BLOCK,), dtype=tl.int32)
    for start in range(0, num_blocks, STEP):
        blocks = start + tl.arange(0, STEP)
        where = blocks[:, None] * E_BLOCK + experts[None, :]
        counts += tl.sum(tl.load(counts_ptr + where, mask=(blocks < num_blocks)[:, None], other=0), axis=0)
    pair_starts = tl.cumsum(counts, axis=0) - counts
    before = pair_starts
    for start in range(0, num_blocks, STEP):
        blocks = start + tl.arange(0, STEP)
        where = blocks[:, None] * E_BLOCK + experts[None, :]
        live = (blocks < num_blocks)[:, None]
        found = tl.load(counts_ptr + where, mask=live, other=0)
        tl.store(counts_ptr + where, before[None, :] + tl.cumsum(found, axis=0) - found, mask=live)
        before += tl.sum(found, axis=0)
    for start in range(0, max_tiles, CHUNK):
        _store_tiles(tiles_ptr, counts, pair_starts, max_tiles, start, BLOCK_M, E_BLOCK, CHUNK)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids_ptr,
    starts_ptr,
    pairs_ptr,
    num_pairs,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each pair to its place: the block's first one of that expert, plus those before it in the block."""
    block = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    mine = block * BLOCK + inner
    live = mine < num_pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids = tl.load(ids_ptr + mine, mask=live, other=E_BLOCK)
    places = tl.load(starts_ptr + block * E_BLOCK + ids, mask=live, other=0)
    for start in range(0, BLOCK, STEP):
        others = start + tl.arange(0, STEP)
        at = block * BLOCK + others
        other_ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=E_BLOCK)
        is_before = (other_ids[None, :] == ids[:, None]) & (others[None, :] < inner[:, None])
        places += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(pairs_ptr + places, mine, mask=live)


def empty_grouping(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Grouping:
    """Buffers for the grouping of expert_ids [T, k]; see the module for their sizes."""
    num_pairs = expert_ids.numel()
    max_tiles = min(num_pairs, num_experts) + num_pairs // block_m
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    return Grouping(pairs, torch.empty(3, max_tiles, dtype=torch.int32, device=expert_ids.device), block_m)


def expert_block(num_experts: int) -> int:
    """Experts that a program counts, a power of two."""
    return max(16, power_of_2(num_experts))


def num_shares(grouping: Grouping) -> int:
    """Programs that `align_share` takes."""
    return ceil_div(max(grouping.pairs.shape[0], grouping.max_tiles), SMALL_SHARE)


def group_pairs(expert_ids: torch.Tensor, num_experts: int, block_m: int, pdl: bool = True) -> Grouping:
    """expert_ids [T, k] int32, contiguous, each in [0, num_experts), T >= 1 -> the grouping; see the module."""
    grouping = empty_grouping(expert_ids, num_experts, block_m)
    pairs, tiles, max_tiles = grouping.pairs, grouping.tiles, grouping.max_tiles
    num_pairs, e_block = expert_ids.numel(), expert_block(num_experts)
    if num_pairs <= MAX_SMALL_PAIRS:
        _align_small_kernel[(num_shares(grouping),)](
            expert_ids, pairs, tiles, num_pairs, max_tiles,
            BLOCK_M=block_m, SHARE=SMALL_SHARE, STEP=SMALL_STEP, E_BLOCK=e_block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return grouping
    num_blocks = ceil_div(num_pairs, SCATTER_BLOCK)
    counts = torch.empty(num_blocks, e_block, dtype=torch.int32, device=expert_ids.device)
    _count_kernel[(num_blocks,)](
        expert_ids, counts, num_pairs, BLOCK=SCATTER_BLOCK, E_BLOCK=e_block, PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    _scan_kernel[(1,)](
        counts, tiles, num_blocks, max_tiles,
        BLOCK_M=block_m, STEP=SCAN_BLOCKS, E_BLOCK=e_block, CHUNK=TILE_CHUNK, PDL=pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    _place_kernel[(num_blocks,)](
        expert_ids, counts, pairs, num_pairs,
        BLOCK=SCATTER_BLOCK, STEP=64, E_BLOCK=e_block, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return grouping
