"""The kernels of grouped experts compile for GPUs with the tiles that are in use; no GPU is needed for that.

Also what was hard to get: MXFP4 reaches the tensor cores without a way through shared memory, small tiles do not
spill, and no product waits for the one before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

SCRIPT = """
import re
import subprocess
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import moe_align, moe_grouped, moe_widen
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, GroupedTile, grouped_constants
from tokenspeed.kernels.triton.moe_plans import ExpertShape, heuristic_plans
from tokenspeed.moe.interface import Activation

CAPABILITY = int(sys.argv[1])
HOPPER = CAPABILITY >= 90
POINTERS = {"mxfp4": ("*i16", "*i32"), "dense": ("*bf16", "*fp32"), "fp8_block": ("*fp8e4nv", "*fp32")}


def build(kernel, constants, kinds, num_warps):
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, n in enumerate(kernel.arg_names) if signature[n].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": num_warps})


def grouped(format, rows, width, block_m, tile, is_up):
    matrix = ExpertMatrix(format, None, None, 1, rows, width)
    activation = Activation(7.0, 1.702) if is_up else None
    constants = grouped_constants(matrix, block_m, 4, activation, tile, torch.bfloat16, HOPPER)
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
    text = built.asm["ttgir"]
    loop = text[text.index("scf.for") : text.index("scf.yield")]
    if HOPPER:
        assert "wgmma.mma_async" in built.asm["ptx"]
        if format == "mxfp4":
            assert "local_store" not in loop and "convert_layout" not in loop, loop
            assert "tt.load" not in loop, loop
        with open(sys.argv[2], "w") as file:
            file.write(built.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", sys.argv[2], "-o", sys.argv[2] + ".cubin"]
        notes = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        # Some ptxas give the largest tile a few registers too few.
        assert int(re.search("([0-9]+) bytes spill stores", notes)[1]) <= (128 if block_m == 128 else 0), notes
        # fp8_block adds each product to the sum itself.
        assert format == "fp8_block" or "serialized" not in notes, notes
    assert built.metadata.shared <= (227 if HOPPER else 163) * 1024


shared = (227 if HOPPER else 163) * 1024
for format, places in {"mxfp4": (0, 1, 3) if HOPPER else (0,), "dense": (0, -1), "fp8_block": (-1,)}.items():
    if format == "fp8_block" and not HOPPER:
        continue
    plans = heuristic_plans(ExpertShape(format, 32, 4, 2880, 2880), False, shared, False)
    for place in places:
        grouped(format, 5760, 2880, plans[place].block_m, plans[place].gate_up, True)
grouped("mxfp4", 2880, 2880, 16, GroupedTile(64, 128, 2, 4, 4), False)
if HOPPER:
    # MXFP4 that was widened.
    grouped("dense", 2880, 2880, 128, GroupedTile(256, 64, 1, 4, 8, 8, tma=True), False)
wide = {"N": 2880, "K": 2880, "BLOCK_N": moe_widen.BLOCK_N, "PTX": HOPPER, "PDL": HOPPER}
built = build(moe_widen._widen_kernel, wide, {"codes_ptr": "*i16", "scales_ptr": "*i32", "wide_ptr": "*bf16"}, 4)
assert "st.global.v4" in built.asm["ptx"] and "ld.global.v4" in built.asm["ptx"]

ints = {n: "*i32" for n in ("ids_ptr", "pairs_ptr", "tiles_ptr", "counts_ptr", "starts_ptr")}
align = {"BLOCK_M": 16, "SHARE": moe_align.SMALL_SHARE, "STEP": moe_align.SMALL_STEP, "E_BLOCK": 128, "PDL": HOPPER}
for name, constants in (
    ("_align_small_kernel", align),
    ("_count_kernel", {"BLOCK": 256, "E_BLOCK": 128, "PDL": HOPPER}),
    ("_scan_kernel", {"BLOCK_M": 128, "STEP": 64, "E_BLOCK": 128, "CHUNK": 128, "PDL": HOPPER}),
    ("_place_kernel", {"BLOCK": 256, "STEP": 64, "E_BLOCK": 128, "PDL": HOPPER}),
):
    build(getattr(moe_align, name), constants, ints, 4 if "small" in name else 8)
build(
    moe_grouped._combine_kernel,
    {"H": 2880, "TOP_K": 4, "SPLIT_K": 2, "BLOCK": 1024, "HAS_RESIDUAL": True, "PDL": HOPPER},
    {"parts_ptr": "*fp32", "residual_ptr": "*bf16", "y_ptr": "*bf16"},
    4,
)
print("compiled")
"""


CAPABILITIES = ("80", "90")


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: one alone takes most of a minute of one core."""
    started = {}
    for capability in CAPABILITIES:
        folder = tmp_path_factory.mktemp(capability)
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
        command = [sys.executable, "-c", SCRIPT, capability, str(folder / "kernel.ptx")]
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
