"""Tiles of the expert kernels that are worth a measurement: what `expert_tune` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenspeed.kernels.triton.moe_grouped import GroupedTile
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import Fp16Tile, why_no_fp16
from tokenspeed.kernels.triton.moe_mxfp4_mma import MmaTile
from tokenspeed.kernels.triton.moe_plans import AnyTile, ExpertShape
from tokenspeed.moe.interface import ExpertFormat, MoeNeed

MIN_TMA_TOKENS = 4096
"""A launch with the copy engine describes its matrix anew, on the host, which a graph does not show: a prompt of 1024
tokens took 60 ms with it where it had taken 33 (docs/log.md)."""


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


def _fp16_tiles(block_m: int) -> Iterator[Fp16Tile]:
    """The fastest few of a sweep of gpt-oss-20b's layer, and what came next to them."""
    if block_m == 32:
        yield from (Fp16Tile(128, 4, 4, 1, False, 8), Fp16Tile(128, 4, 4, 1, True, 8), Fp16Tile(64, 4, 4, 1, True, 8))
    elif block_m == 64:
        yield from (Fp16Tile(128, 4, 8, 4, False, 16), Fp16Tile(128, 4, 4, 4, True, 16))
    elif block_m == 128:
        yield from (Fp16Tile(128, 5, 8, 4, ahead, 32, 128) for ahead in (True, False))
        yield from (Fp16Tile(128, 5, 4, 4, True, 32), Fp16Tile(256, 5, 16, 4, True, 32))


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


def ways(need: MoeNeed, block_m: int) -> tuple[bool, ...]:
    """Which values of `fp16`, by `moe_mxfp4_fp16`, are worth a try. The tuner's scales are close together."""
    may_be_fp16 = need.format == "mxfp4" and block_m >= 32 and why_no_fp16(need.activation) is None
    return (False, True) if may_be_fp16 else (False,)


def tiles_to_try(need: MoeNeed, count: int, block_m: int, is_up: bool, fp16: bool) -> Iterator[AnyTile]:
    if fp16:
        yield from _fp16_tiles(block_m)
        return
    for tile in tile_candidates(need.format, block_m, is_up):
        if not isinstance(tile, GroupedTile) or not tile.tma or count >= MIN_TMA_TOKENS:
            yield tile
