"""Attention kernels, and those around torch's own, compile for a GPU in the shapes of GPT-OSS and Qwen3.

No GPU is needed for that. The interpreter takes what the compiler refuses, and knows neither registers nor shared
memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

SCRIPT = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed.kernels.triton import decode_attention, prefill_attention, whole_prompts

FLOATS = ("scale", "out_scale")
KINDS = {
    **dict.fromkeys(("page_table_ptr", "seq_lens_ptr", "query_start_ptr", "counter_ptr"), "*i32"),
    **dict.fromkeys(("sinks_ptr", "partial_ptr", "stats_ptr", "log_sum_ptr"), "*fp32"),
}


def compiled(name, kernel, sizes, missing, num_warps, num_stages):
    signature, constants = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in sizes or argument in missing:
            signature[argument] = "constexpr"
            constants[(index,)] = sizes.get(argument)
        elif argument.endswith("_ptr"):
            signature[argument] = KINDS.get(argument, "*bf16")
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") and (index,) not in constants or argument == "q_stride"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, "shared", out.metadata.shared)
    return out


def shape(heads, kv_heads, head_dim, window, has_sinks):
    return {
        "logit_cap": 0.0, "WINDOW": window, "HAS_SINKS": has_sinks, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim, "PAGE_SIZE": 64,
    }


MODELS = {"gpt-oss": ((64, 8, 64), (0, 128)), "qwen3": ((32, 8, 128), (0,))}
for model, ((heads, kv_heads, head_dim), windows) in MODELS.items():
    for window in windows:
        has_sinks = model == "gpt-oss"
        missing = set() if has_sinks else {"sinks_ptr"}
        base = shape(heads, kv_heads, head_dim, window, has_sinks)
        keys = torch.empty(1, 64, kv_heads, head_dim, device="meta")
        for rows in (8, 256, 2048):
            tile = decode_attention.choose_decode_tile(rows, head_dim, window or None)
            sizes = decode_attention.decode_constants(heads, keys, tile, window or None, has_sinks, None, True)
            compiled(
                f"decode {model} window {window} rows {rows}", decode_attention._decode_kernel, sizes, missing,
                tile.num_warps, tile.num_stages,
            )
        tile = prefill_attention.TILE
        sizes = base | {"NUM_HEADS": heads, "BLOCK_Q": tile.block_q, "BLOCK_T": tile.block_t}
        compiled(
            f"prefill {model} window {window}", prefill_attention._prefill_kernel, sizes, missing,
            tile.num_warps, tile.num_stages,
        )
    sizes = {"WIDTH": kv_heads * head_dim, "BLOCK_W": kv_heads * head_dim, "PAGE_SIZE": 64, "BLOCK_T": 8}
    compiled(f"copy {model}", whole_prompts._copy_kernel, sizes, (), 8, 3)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_T": 32}
    compiled(f"sinks {model}", whole_prompts._sink_kernel, sizes, (), 2, 3)
"""

SHARED_BYTES = 227 * 1024
"""What a program may have on Hopper."""


def test_they_compile_and_fit_a_hopper(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"shared (\d+)", done.stdout)
    assert len(found) == 16, done.stderr[-3000:]
    assert all(int(shared) <= SHARED_BYTES for shared in found)
