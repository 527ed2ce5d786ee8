"""Linears of few rows compile for GPUs with the tiles that are chosen there, and fit their shared memory; no GPU is
needed for that. The interpreter takes what the compiler refuses, and knows no shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_device import DEVICE, randn
from offline_compile import SHARED_BYTES, start

from tokenspeed.kernels.triton import fp8_linear, registered, small_linear
from tokenspeed.kernels.triton.small_linear import MAX_ROWS, SkinnyTile, choose_tile, fitting_tile

SCRIPT = """
import sys
from offline_compile import SHARED_BYTES, build
from tokenspeed.kernels.triton import small_linear
from tokenspeed.kernels.triton.small_linear import block_m, choose_tile, fitting_tile

CAPABILITY = int(sys.argv[1])
KINDS = {
    **dict.fromkeys(("x_ptr", "w_ptr", "norm_ptr", "residual_ptr", "y_ptr"), "*bf16"),
    **dict.fromkeys(("scale_ptr", "partial_ptr"), "*fp32"), "counter_ptr": "*i32", "eps": "fp32",
}


def skinny(rows, num_out, width, gated, in_e4m3=False):
    tile = choose_tile(rows, num_out, width, gated, 1 if in_e4m3 else 2)
    tile = fitting_tile(tile, rows, gated, 1 if in_e4m3 else 2, SHARED_BYTES[CAPABILITY])
    constants = {
        "K": width, "BLOCK_M": block_m(rows), "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLIT_K": tile.split_k, "STAGES": tile.stages, "HAS_BIAS": False, "HAS_NORM": gated and in_e4m3,
        "HAS_RESIDUAL": not gated, "GATED": gated, "SCALES": "block" if in_e4m3 else "none", "CVT": in_e4m3,
        "PREFETCH_LINES": tile.prefetch_lines, "PDL": CAPABILITY >= 90, "bias_ptr": None,
    }
    constants |= {"residual_ptr": None} if gated else {}
    constants |= {} if constants["HAS_NORM"] else {"norm_ptr": None}
    constants |= {} if in_e4m3 else {"scale_ptr": None}
    kinds = KINDS | ({"w_ptr": "*fp8e4nv"} if in_e4m3 else {})
    build(small_linear._skinny_kernel, constants, kinds, CAPABILITY, tile.num_warps, aligned=("num_out",))


for rows in (4, 64):  # of Qwen3-8B: gate and up, down
    skinny(rows, 12288, 4096, True)
for rows in (32, 64):
    skinny(rows, 4096, 12288, False)
if CAPABILITY >= 89:
    skinny(4, 12288, 4096, True, True)
    skinny(64, 4096, 12288, False, True)
print("compiled")
"""


@pytest.mark.timeout(300)
def test_they_compile_and_fit(tmp_path: Path) -> None:
    """Regression: three of these tiles needed more than the 99 KiB of most GPUs, and the start ended there."""
    started = {str(name): start(SCRIPT, tmp_path / str(name), str(name)) for name in (89, 90)}  # 80 and 120 once
    said = {name: process.communicate() for name, process in started.items()}
    assert all(out.strip() == "compiled" for out, _ in said.values()), {n: e[-1500:] for n, (_, e) in said.items()}


SHAPES = [
    (num_out, width, gated)
    for num_out in (64, 2880, 4096, 6144, 12288, 14336)
    for width in (576, 2880, 4096, 12288)
    for gated in (False, True)
]


@pytest.mark.parametrize("weight_bytes", [1, 2])
def test_tiles_of_a_hopper_are_those_measured(weight_bytes: int) -> None:
    for rows in range(2, MAX_ROWS + 1):
        for num_out, width, gated in SHAPES:
            tile = choose_tile(rows, num_out, width, gated, weight_bytes)
            assert isinstance(tile, SkinnyTile)
            assert fitting_tile(tile, rows, gated, weight_bytes, SHARED_BYTES[90]) == tile


def test_smaller_tiles_still_read_ahead_and_fit_the_workspace() -> None:
    for rows in range(2, MAX_ROWS + 1):
        for num_out, width, gated in SHAPES:
            tile = choose_tile(rows, num_out, width, gated)
            assert isinstance(tile, SkinnyTile)
            fits = fitting_tile(tile, rows, gated, 2, SHARED_BYTES[89])
            assert fits.stages >= 3 and fits.split_k == tile.split_k and fits.block_k == tile.block_k
            assert fits.block_n == tile.block_n or fits.split_k == 1


def test_a_tile_that_does_not_fit_loses_stages_then_outputs() -> None:
    assert fitting_tile(SkinnyTile(64, 128, 2, 6), 32, False, 2, 99 * 1024) == SkinnyTile(64, 128, 2, 5)
    assert fitting_tile(SkinnyTile(128, 128, 1, 3, 8), 4, True, 2, 99 * 1024) == SkinnyTile(64, 128, 1, 3, 4)
    assert fitting_tile(SkinnyTile(64, 128, 2, 6), 32, False, 2, 1).stages == 2, "the last, where nothing fits"


@pytest.mark.parametrize("in_e4m3", [False, True])
def test_the_ops_ask_the_gpu(in_e4m3: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[SkinnyTile] = []
    room = fp8_linear if in_e4m3 else small_linear
    monkeypatch.setattr(room, "skinny_linear", lambda *given: tiles.append(given[-3]))
    for limit in (SHARED_BYTES[90], 48 * 1024):
        for module in (registered, fp8_linear):
            monkeypatch.setattr(module, "shared_bytes", lambda device, limit=limit: limit)
        x, weight = randn(64, 512), randn(768, 512)
        if in_e4m3:
            scale = torch.ones(6, 4, device=DEVICE)
            fp8_linear.TritonFp8Linear(DEVICE, False)(x, weight.to(torch.float8_e4m3fn), scale, gated=True)
        else:
            registered.TritonLinear(DEVICE, False)(x, weight.bfloat16(), gated=True)
    assert tiles == [SkinnyTile(128, 64, 1, 4), SkinnyTile(128 if in_e4m3 else 64, 64, 1, 3)]
