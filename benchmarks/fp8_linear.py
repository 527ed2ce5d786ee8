"""Time of linears over e4m3 weights on a GPU at the shapes of a dense model, beside the bound of their bytes.

    python benchmarks/fp8_linear.py --rows 1,16,64 --sweep

Few rows: one CUDA graph over the layer's four linears with distinct weights, so that nothing is found in L2; TB/s of
weight bytes, bfloat16 beside it. `--sweep` times every tile. Many rows (above 64): TFLOP/s of activation quantization
and fp8 matmul together. Medians of 5; the last line is JSON. Default shapes: Qwen3-8B.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from tokenspeed.kernels.triton.fp8_linear import (
    TritonFp8Linear,
    choose_tile,
    dequantize_blocks,
    fused_fp8_linear,
    quantize_rows,
)
from tokenspeed.kernels.triton.small_linear import GemvTile, SkinnyTile, fused_linear, make_workspace

COPY_TB_S = 4.26
"""Measured on an H200, read and write."""
COPIES = 24
REPEATS = 5

GEMV_TILES = [
    GemvTile(block_n, block_k, warps)
    for block_n, block_k, warps in (
        (2, 2048, 4), (2, 4096, 4), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (4, 4096, 8), (8, 1024, 4), (8, 2048, 4),
        (8, 1024, 8), (8, 2048, 8), (16, 512, 4), (16, 512, 8), (16, 1024, 8),
    )
]  # fmt: skip
SKINNY_TILES = [
    SkinnyTile(block_n, block_k, split_k, stages, warps, lines)
    for block_n, block_k, split_k, stages, warps, lines in (
        (64, 128, 1, 4, 4, 0), (64, 128, 2, 4, 4, 0), (64, 128, 4, 4, 4, 0), (64, 128, 1, 6, 4, 4),
        (64, 256, 1, 3, 4, 0), (64, 256, 2, 3, 4, 0), (128, 128, 1, 4, 8, 0), (128, 128, 1, 3, 8, 4),
        (128, 128, 2, 4, 8, 0), (64, 64, 1, 8, 4, 4),
    )
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear: [num_out, width], with what is fused into it."""

    name: str
    num_out: int
    width: int
    normed: bool = False
    gated: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    rows: int
    kind: str
    tile: str
    microseconds: float
    tb_s: float


def shapes(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> list[Shape]:
    return [
        Shape("qkv", (heads + 2 * kv_heads) * head_dim, hidden, normed=True),
        Shape("o", hidden, heads * head_dim, adds=True),
        Shape("gate_up", 2 * inner, hidden, normed=True, gated=True),
        Shape("down", hidden, inner, adds=True),
    ]


def graph_microseconds(launch: Callable[[int], None], count: int) -> float:
    """Time of one of `count` launches in a replayed graph."""
    for index in range(count):
        launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    times: list[float] = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 4 / count)
    return statistics.median(times[1:])


def few_rows(shape: Shape, rows: int, sweep: bool) -> list[Result]:
    """e4m3 by row and by block with the chosen tile (or all), and bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    dense = [
        torch.empty(shape.num_out, shape.width, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        for _ in range(COPIES)
    ]
    weights = [weight.to(torch.float8_e4m3fn) for weight in dense]
    by_row = torch.full((shape.num_out,), 1e-3, device="cuda")
    by_block = torch.full((shape.num_out // 128, shape.width // 128), 1e-3, device="cuda")
    x = torch.randn(rows, shape.width, dtype=torch.bfloat16, device="cuda")
    norm = torch.ones(shape.width, dtype=torch.bfloat16, device="cuda") if shape.normed else None
    outs = shape.num_out // (2 if shape.gated else 1)
    residual = torch.zeros(rows, outs, dtype=torch.bfloat16, device="cuda") if shape.adds else None
    workspace = make_workspace(torch.device("cuda"))
    results = []

    def add(kind: str, tile: str, nbytes: int, launch: Callable[[int], object]) -> None:
        try:
            microseconds = graph_microseconds(launch, COPIES)  # type: ignore[arg-type]
        except Exception as error:  # a tile that needs more than the card has
            print(f"  {shape.name} {kind} {tile}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            return
        results.append(
            Result(shape.name, rows, kind, tile, round(microseconds, 2), round(nbytes / microseconds / 1e6, 2))
        )

    size = shape.num_out * shape.width

    def fp8(scale: torch.Tensor, tile: GemvTile | SkinnyTile) -> Callable[[int], object]:
        return lambda i: fused_fp8_linear(
            x, weights[i], scale, workspace, None, norm, 1e-6, residual, shape.gated, tile=tile
        )

    def bf16(i: int) -> object:
        return fused_linear(x, dense[i], workspace, None, norm, 1e-6, residual, shape.gated)

    chosen = choose_tile(rows, outs, shape.width, shape.normed or shape.gated)
    add("bf16", "chosen", 2 * size, bf16)
    add("fp8 row", f"chosen {chosen}", size, fp8(by_row, chosen))
    add("fp8 block", f"chosen {chosen}", size, fp8(by_block, chosen))
    if sweep:
        for tile in GEMV_TILES if rows == 1 else SKINNY_TILES:
            if isinstance(tile, SkinnyTile) and tile.split_k > 1 and (shape.normed or shape.gated or outs > 4096):
                continue
            add("fp8 row", str(tile), size, fp8(by_row, tile))
    return results


def many_rows(shape: Shape, rows: int) -> list[Result]:
    """Microseconds; the last column is PFLOP/s here."""
    operations = 2 * rows * shape.num_out * shape.width
    dense = torch.randn(shape.num_out, shape.width, device="cuda").to(torch.bfloat16)
    weight = dense.to(torch.float8_e4m3fn)
    by_row = torch.full((shape.num_out,), 1e-3, device="cuda")
    by_block = torch.full((shape.num_out // 128, shape.width // 128), 1e-3, device="cuda")
    x = torch.randn(rows, shape.width, dtype=torch.bfloat16, device="cuda")
    linear = TritonFp8Linear(torch.device("cuda"), True)
    launches: dict[str, Callable[[int], object]] = {
        "bf16 cuBLAS": lambda i: functional.linear(x, dense),
        "fp8 row": lambda i: linear(x, weight, by_row),
        "fp8 block": lambda i: linear(x, weight, by_block),
        "quantize_rows": lambda i: quantize_rows(x),
        "dequantize_blocks": lambda i: dequantize_blocks(weight, by_block, torch.bfloat16),
    }
    results = []
    for kind, launch in launches.items():
        microseconds = graph_microseconds(launch, 8)  # type: ignore[arg-type]
        rate = operations / microseconds / 1e9 if "quantize" not in kind else 0.0
        results.append(Result(shape.name, rows, kind, "", round(microseconds, 2), round(rate, 3)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,1024")
    parser.add_argument("--sweep", action="store_true", help="every tile, not only the chosen one")
    parser.add_argument("--shape", default="4096,12288,32,8,128", help="hidden, inner, heads, kv heads, head dim")
    args = parser.parse_args()
    found: list[Result] = []
    for rows in (int(text) for text in args.rows.split(",")):
        print(f"rows {rows} (bound {COPY_TB_S} TB/s)" if rows <= 64 else f"rows {rows} (last column: PFLOP/s)")
        for shape in shapes(*(int(text) for text in args.shape.split(","))):
            results = few_rows(shape, rows, args.sweep) if rows <= 64 else many_rows(shape, rows)
            for result in sorted(results, key=lambda result: (result.kind, result.microseconds)):
                time = f"{result.microseconds:>9.2f} us {result.tb_s:>7.2f}"
                print(f"  {result.shape:<8} {result.kind:<18} {time}  {result.tile}")
            found += results
            torch.cuda.empty_cache()
    about = {"benchmark": "fp8_linear", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({**about, "results": [asdict(result) for result in found]}))


if __name__ == "__main__":
    main()
