"""The kernels of grouped experts compile for GPUs with the tiles that are in use; no GPU is needed for that.

Also what was hard to get: MXFP4 reaches the tensor cores without a way through shared memory, and nothing spills.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import moe_align, moe_grouped
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
        for place, n in enumerate(kernel.arg_names) if n.endswith("_ptr") and n not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": num_warps})


def grouped(format, rows, width, block_m, tile, is_up):
    matrix = ExpertMatrix(format, None, None, 1, rows, width)
    activation = Activation(7.0, 1.702) if is_up else None
    constants = grouped_constants(matrix, block_m, 4, activation, tile, torch.bfloat16, HOPPER)
    weight, scale = POINTERS[format]
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
    assert built.metadata.shared <= (227 if HOPPER else 163) * 1024


shared = (227 if HOPPER else 163) * 1024
for format in ("mxfp4", "dense") + (("fp8_block",) if HOPPER else ()):
    seen = set()
    for plan in heuristic_plans(ExpertShape(format, 32, 4, 2880, 2880), False, shared, False):
        if (plan.block_m, plan.gate_up) not in seen:
            seen.add((plan.block_m, plan.gate_up))
            grouped(format, 5760, 2880, plan.block_m, plan.gate_up, True)
    grouped(format, 2880, 2880, 16, GroupedTile(128, 64, 2, 4, 4, 2, "join", 2), False)

ints = {n: "*i32" for n in ("ids_ptr", "pairs_ptr", "tiles_ptr", "counts_ptr", "starts_ptr")}
align = {"BLOCK_M": 16, "P_BLOCK": 128, "STEP": 64, "E_BLOCK": 32, "CHUNK": 64, "PDL": HOPPER}
for name, constants in (
    ("_align_small_kernel", align),
    ("_align_small_kernel", align | {"P_BLOCK": 512, "E_BLOCK": 128}),
    ("_count_kernel", {"BLOCK": 256, "E_BLOCK": 128, "PDL": HOPPER}),
    ("_scan_kernel", {"BLOCK_M": 128, "STEP": 64, "E_BLOCK": 128, "CHUNK": 128, "PDL": HOPPER}),
    ("_place_kernel", {"BLOCK": 256, "STEP": 64, "E_BLOCK": 128, "PDL": HOPPER}),
):
    build(getattr(moe_align, name), constants, ints, 8)
build(
    moe_grouped._combine_kernel,
    {"H": 2880, "TOP_K": 4, "SPLIT_K": 2, "BLOCK": 1024, "HAS_RESIDUAL": True, "PDL": HOPPER},
    {"parts_ptr": "*fp32", "residual_ptr": "*bf16", "y_ptr": "*bf16"},
    4,
)
print("compiled")
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_they_compile(capability: str, tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, capability], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
