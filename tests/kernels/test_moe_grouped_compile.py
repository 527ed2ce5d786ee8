"""The kernels of grouped experts compile for GPUs with the tiles that are in use; no GPU is needed for that.

Also what was hard to get: small tiles do not spill, and no product waits for the one before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from offline_compile import SHARED_BYTES

SCRIPT = """
import re
import subprocess
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from tokenspeed.kernels.triton import moe_align, moe_grouped, moe_mxfp4_fp16, moe_mxfp4_mma
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, GroupedTile, grouped_constants
from tokenspeed.kernels.triton.moe_mxfp4_mma import mma_constants
from tokenspeed.kernels.triton.moe_plans import FP16_PLANS, ExpertShape, heuristic_plans
from tokenspeed.moe.interface import Activation

CAPABILITY = int(sys.argv[1])
SHARED = int(sys.argv[3])
HOPPER = CAPABILITY == 90
POINTERS = {"mxfp4": ("*u8", "*i32"), "dense": ("*bf16", "*fp32"), "fp8_block": ("*fp8e4nv", "*fp32")}


def build(kernel, constants, kinds, num_warps, source_of=ASTSource, more={}):
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, n in enumerate(kernel.arg_names) if signature[n].startswith("*")
    }
    source = source_of(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": num_warps, **more})


def grouped(format, rows, width, block_m, tile, is_up):
    matrix = ExpertMatrix(format, None, None, 1, rows, width)
    activation = Activation(7.0, 1.702) if is_up else None
    constants = grouped_constants(matrix, block_m, 4, activation, tile, torch.bfloat16, CAPABILITY >= 90)
    weight, scale = POINTERS[format]
    if tile.tma:
        weight = f"tensordesc<bf16[{tile.block_n}, {tile.block_k}]>"
    kinds = {
        "x_ptr": "*bf16", "w_ptr": weight, "scale_ptr": scale, "bias_ptr": "*bf16", "pairs_ptr": "*i32",
        "tiles_ptr": "*i32", "route_ptr": "*fp32", "y_ptr": "*bf16" if is_up else "*fp32",
    }
    if format == "dense":
        constants["scale_ptr"] = None
    built = build(moe_grouped._grouped_kernel, constants, kinds, tile.num_warps)
    if HOPPER and format != "mxfp4":
        assert "wgmma.mma_async" in built.asm["ptx"]
        notes = ptxas_notes(built.asm["ptx"])
        # Some ptxas give the largest tile a few registers too few.
        assert int(re.search("([0-9]+) bytes spill stores", notes)[1]) <= (128 if block_m == 128 else 0), notes
        # fp8_block adds each product to the sum itself.
        assert format == "fp8_block" or "serialized" not in notes, notes
    assert built.metadata.shared <= SHARED, built.metadata.shared


def ptxas_notes(ptx):
    with open(sys.argv[2], "w") as file:
        file.write(ptx)
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", sys.argv[2], "-o", sys.argv[2] + ".cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def mma(block_m, tile, activation, is_up):
    matrix = ExpertMatrix("mxfp4", None, None, 1, 5760 if is_up else 2880, 2880)
    constants = mma_constants(matrix, block_m, 4, activation, is_up, tile)
    has_scale = constants["H_SCALE"] > 0
    kinds = {
        "high_ptr": "*fp8e4nv", "low_ptr": "*fp8e5", "inverse_ptr": "*fp32", "w_ptr": "*u8", "scale_ptr": "*i32",
        "bias_ptr": "*bf16", "pairs_ptr": "*i32", "tiles_ptr": "*i32", "route_ptr": "*fp32", "y_low_ptr": "*fp8e5",
        "y_ptr": ("*fp8e4nv" if has_scale else "*bf16") if is_up else "*fp32",
    }
    built = build(moe_mxfp4_mma.product_kernel, constants, kinds, tile.num_warps, GluonASTSource)
    ptx = built.asm["ptx"]
    notes = ptxas_notes(ptx)
    assert int(re.search("([0-9]+) bytes spill stores", notes)[1]) <= (64 if block_m == 64 else 0), notes
    assert "serialized" not in notes, notes
    assert "wgmma.mma_async.sync.aligned.m64n" in ptx and "f32.e4m3.e5m2" in ptx and "f32.e4m3.e4m3" in ptx
    assert "cvt.rn.satfinite.e5m2x2" not in ptx, "see moe_mxfp4.low_bits"
    assert built.metadata.shared <= 227 * 1024


def fp16(block_m, tile, is_up):
    matrix = ExpertMatrix("mxfp4", None, None, 1, 5760 if is_up else 2880, 2880)
    constants = moe_mxfp4_fp16.fp16_constants(matrix, block_m, 4, Activation(7.0, 1.702), is_up, tile)
    constants["route_ptr" if is_up else "inverse_ptr"] = None
    kinds = {
        "x_ptr": "*fp16", "inverse_ptr": "*fp32", "w_ptr": "*u8", "scale_ptr": "*i32", "reference_ptr": "*i32",
        "bias_ptr": "*bf16", "pairs_ptr": "*i32", "tiles_ptr": "*i32", "route_ptr": "*fp32",
        "y_ptr": "*fp16" if is_up else "*bf16",
    }
    more = {"maxnreg": tile.max_registers}
    built = build(moe_mxfp4_fp16.fp16_kernel, constants, kinds, tile.num_warps, GluonASTSource, more)
    ptx = built.asm["ptx"]
    notes = ptxas_notes(ptx)
    assert int(re.search("([0-9]+) bytes spill stores", notes)[1]) <= (64 if block_m == 128 else 0), notes
    assert "serialized" not in notes, notes
    for columns in (block_m, block_m // 2, block_m // 4):
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16" in ptx
    # Two of the large ones, or four of the others, fit on an SM.
    assert built.metadata.shared <= 227 * 1024 // (2 if block_m == 128 else 4) - 1024


for format, places in {"mxfp4": (0, 1, 3) if HOPPER else (0,), "dense": (0, -1), "fp8_block": (-1,)}.items():
    if format == "fp8_block" and CAPABILITY < 89:
        continue  # refused there
    plans = heuristic_plans(ExpertShape(format, 32, 4, 2880, 2880), False, SHARED, False)
    for place in places if CAPABILITY in (80, 90) else places[-1:]:
        grouped(format, 5760, 2880, plans[place].block_m, plans[place].gate_up, True)
if CAPABILITY not in (80, 90):  # the other kernels have no tiles
    print("compiled")
    sys.exit()
grouped("mxfp4", 2880, 2880, 16, GroupedTile(64, 128, 2, 4, 4), False)
if HOPPER:
    assert moe_mxfp4_mma.NO_GLUON is None
    clamped, swiglu = Activation(7.0, 1.702), Activation()
    for plan in heuristic_plans(ExpertShape("mxfp4", 32, 4, 2880, 2880), False, SHARED, False, True)[::2]:
        if plan.mma:
            mma(plan.block_m, plan.mma.gate_up, clamped, True)
            mma(plan.block_m, plan.mma.down, clamped, False)
    for is_up in (True, False):
        mma(32, moe_mxfp4_mma.MmaTile(), swiglu, is_up)
    for _, _, block_m, tile in FP16_PLANS:
        for is_up in (True, False):
            fp16(block_m, tile, is_up)
    # By the copy engine.
    grouped("dense", 2880, 2880, 128, GroupedTile(256, 64, 1, 4, 8, 8, tma=True), False)
ints = {n: "*i32" for n in ("ids_ptr", "pairs_ptr", "tiles_ptr", "counts_ptr", "starts_ptr")}
align = {"BLOCK_M": 16, "SHARE": moe_align.SMALL_SHARE, "STEP": moe_align.SMALL_STEP, "E_BLOCK": 128, "PDL": HOPPER}
for name, constants in (
    ("_align_small_kernel", align),
    ("_count_kernel", {"BLOCK": 256, "E_BLOCK": 128, "PDL": HOPPER}),
    ("_scan_kernel", {"BLOCK_M": 128, "STEP": 64, "E_BLOCK": 128, "CHUNK": 128, "PDL": HOPPER}),
    ("_place_kernel", {"BLOCK": 256, "STEP": 64, "E_BLOCK": 128, "PDL": HOPPER}),
):
    build(getattr(moe_align, name), constants, ints, 4 if "small" in name else 8)
if HOPPER:
    split = {"K": 2880, "BLOCK": 4096, "PDL": True}
    kinds = dict(ints, x_ptr="*bf16", high_ptr="*fp8e4nv", low_ptr="*fp8e5", inverse_ptr="*fp32")
    for kernel, constants in (
        (moe_mxfp4_mma._split_kernel, split), (moe_mxfp4_mma._prepare_kernel, dict(align, **split))
    ):
        ptx = build(kernel, constants, kinds, 4).asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "cvt.rn.satfinite.e5m2x2" not in ptx
    kinds = {"x_ptr": "*bf16", "y_ptr": "*fp16", "inverse_ptr": "*fp32"}
    assert "st.global.v4" in build(moe_mxfp4_fp16._scale_kernel, split, kinds, 4).asm["ptx"]
build(
    moe_grouped._combine_kernel,
    {"H": 2880, "TOP_K": 4, "SPLIT_K": 2, "BLOCK": 1024, "HAS_RESIDUAL": True, "PDL": HOPPER},
    {"parts_ptr": "*fp32", "residual_ptr": "*bf16", "y_ptr": "*bf16"},
    4,
)
print("compiled")
"""


CAPABILITIES = ("80", "89", "90")
"""12.0 has as much room as 8.9: it was compiled once, by adding it here."""


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: one alone takes most of a minute of one core."""
    started = {}
    for capability in CAPABILITIES:
        folder = tmp_path_factory.mktemp(capability)
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
        shared_bytes = str(SHARED_BYTES[int(capability)])
        command = [sys.executable, "-c", SCRIPT, capability, str(folder / "kernel.ptx"), shared_bytes]
        started[capability] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_compile(capability: str, compilers: dict[str, subprocess.Popen[str]]) -> None:
    said, errors = compilers[capability].communicate()
    assert said.strip() == "compiled", errors[-3000:]
