"""The expert and router kernels of a decode step compile for GPUs, PDL included; no GPU is needed for that.

The interpreter takes what the compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import moe_gemv, moe_route


def build(kernel, kinds, sizes, num_warps=4):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kinds[name] for name in names}
    values = {(names.index(name),): value for name, value in sizes.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cubin" in compiled.asm


half, wide, whole = "*bf16", "*fp32", "*i32"
common = dict(bias_ptr=half, ids_ptr=whole, weights_ptr=wide, limit="fp32", alpha="fp32")
sizes = dict(TOP_K=4, BLOCK_K=1024, HAS_BIAS=True, PDL=True)
gate_up = dict(sizes, NUM_ROWS=1536, K=2048, BLOCK_N=4, CLAMPED=False)
build(moe_gemv._gate_up_kernel, dict(common, x_ptr=half, w_ptr=half, h_ptr=wide), gate_up)
down = dict(sizes, NUM_ROWS=2048, K=768, BLOCK_N=8, SPLIT=4, ADD=True)
kinds = dict(common, h_ptr=wide, w_ptr=half, out_ptr=half, partial_ptr=wide, counter_ptr=whole)
build(moe_gemv._down_kernel, kinds, down)

kinds = dict(
    x_ptr=half, norm_ptr=half, w_ptr=half, bias_ptr=half, y_ptr=half, scores_ptr=wide, counter_ptr=whole,
    ids_ptr=whole, weights_ptr=wide, parts_ptr=wide, eps="fp32", num_tokens="i32",
)
rule = dict(E=128, TOP_K=8, OF_ALL=True, HAS_BIAS=True, PDL=True, BLOCK_E=128)
build(moe_route._fused_kernel, kinds, dict(rule, H=2880, OWN_E=1, BLOCK_H=4096, HAS_NORM=True))
build(moe_route._pick_kernel, kinds, dict(rule, SPLIT=4), num_warps=1)
tile = dict(H=2880, E=128, SPLIT=4, BLOCK_T=16, BLOCK_E=64, BLOCK_H=64, STAGES=4, PDL=True)
build(moe_route._scores_kernel, kinds, tile)
print("compiled")
"""


def test_they_compile(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
