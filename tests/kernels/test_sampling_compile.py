"""The sampling kernels compile for GPUs, without one: the interpreter takes what the compiler refuses (one name of two
types in two branches, a constant too small for float32)."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import sampling as room

vocab, logits = int(sys.argv[2]), sys.argv[3]
chunks = triton.cdiv(vocab, room.CHUNK)
groups = chunks * (room.CHUNK // room.GROUP)
SIZES = dict(
    V=vocab, CHUNK=room.CHUNK, PIECE=room.PIECE, GROUPS=room.CHUNK // room.GROUP, NUM_CHUNKS=chunks,
    BLOCK_CHUNKS=triton.next_power_of_2(chunks), NUM_GROUPS=groups, BLOCK_GROUPS=triton.next_power_of_2(groups),
    BUCKETS=room.BUCKETS, PER_T=room.BUCKETS_PER_T, SCALE=room.MASS, LISTED=room.LISTED, SHIFT=16, BLOCK=1024,
    BLOCK_ROW=8192, PDL=int(sys.argv[1]) >= 90,
)
INT64 = ("positions_ptr", "places_ptr", "seed_ptr", "masses_ptr", "need_ptr", "token_ids_ptr")
INT32 = ("slots_ptr", "top_k_ptr", "indices_ptr", "listed_ptr", "list_ids_ptr", "out_ptr", "masks_ptr")
KINDS = {name: "*i64" for name in INT64} | {name: "*i32" for name in INT32}
KINDS |= {"logits_ptr": logits, "copies_ptr": logits, "token_ids_stride": "i32", "is_again": "i32"}
UNMASKED = {"MASKED": False, "places_ptr": None, "masks_ptr": None, "copies_ptr": None}

for name, more in (
    ("_survey_kernel", UNMASKED), ("_survey_kernel", {"MASKED": True}),
    ("_weigh_kernel", {}), ("_gather_kernel", {}), ("_choose_kernel", {}),
):
    kernel, known = getattr(room, name), SIZES | more
    kinds = {arg: "constexpr" if arg in known else KINDS.get(arg, "*fp32") for arg in kernel.arg_names}
    sizes = {(kernel.arg_names.index(size),): value for size, value in known.items() if size in kinds}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8})
    assert "cubin" in compiled.asm
print("compiled")
"""


def test_they_compile(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, "90", "151936", "*bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
