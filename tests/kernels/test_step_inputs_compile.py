"""Kernels that fill a recorded step's inputs compile for GPUs; no GPU is needed for that. The number of cache groups
is a size of the launch, so that one kernel serves all.

The interpreter takes what the compiler refuses: the first version of `_prefill_inputs_kernel` gave one name two types
in two branches, ran here and would have failed on every GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import step_inputs

INT32 = ("rows_ptr", "page_table_ptr", "windows_ptr", "query_start_ptr", "seq_lens_ptr", "out_pages_ptr")
SIZES = {"PAGE_SIZE": 64, "BLOCK": 64, "BLOCK_R": 8, "BLOCK_P": 128}

for name in ("_decode_inputs_kernel", "_prefill_inputs_kernel"):
    kernel = getattr(step_inputs, name)
    kinds = {}
    for argument in kernel.arg_names:
        if argument in SIZES:
            kinds[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            kinds[argument] = "*i32" if argument in INT32 else "*i64"
        else:
            kinds[argument] = "i32"
    sizes = {(kernel.arg_names.index(size),): value for size, value in SIZES.items() if size in kinds}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 1})
    assert "cubin" in compiled.asm
print("compiled")
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_they_compile(capability: str, tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, capability], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
