"""Time of one decode step of CPU kernels, at the shapes of SmolLM2-135M: random Q4_1 weights, a Q8_0 head.

    python benchmarks/cpu_kernels.py --rows 1,8 --context 256

Prints, for each batch size, the step as a tape and eagerly, the bytes that it must read and the bound that these give
at the measured bandwidth; the last line is JSON. The minimum is what the machine can do, the median what it did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.registry import Need, select_ops

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
PAGE = 64
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
EPS = 1e-5


@dataclass
class Layer:
    qkv: object
    out: object
    gate_up: object
    down: object
    norms: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor


def random_blocks(out_features: int, in_features: int, qtype: str) -> torch.Tensor:
    """GGUF rows with random codes and small scales."""
    header, body = {"Q4_1": (4, 16), "Q8_0": (2, 32)}[qtype]
    blocks = torch.randint(0, 256, (out_features, in_features // 32, header + body), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.002], dtype=torch.float16).view(torch.uint8)
    if header == 4:
        blocks[..., 2:4] = torch.tensor([-0.015], dtype=torch.float16).view(torch.uint8)
    return blocks.view(out_features, -1)


class Step:
    """A decode step over random weights, like the model's own forward."""

    def __init__(self, ops: Ops, max_pages: int) -> None:
        self.ops = ops
        linear = ops.block_linear
        assert linear is not None, "no block_linear here"
        self.linear = linear
        self.weight_bytes = 0
        self.table = torch.randn(VOCABULARY, HIDDEN).to(ops.dtype)
        self.head = self.pack(VOCABULARY, HIDDEN, "Q8_0")
        self.norm = torch.ones(HIDDEN, dtype=ops.dtype)
        angles = torch.outer(torch.arange(8192.0), 1e5 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        pool = (max_pages, PAGE, KV_HEADS, HEAD_DIM)
        self.layers = [
            Layer(
                self.pack(QKV, HIDDEN, "Q4_1"),
                self.pack(HIDDEN, HEADS * HEAD_DIM, "Q4_1"),
                self.pack(2 * INNER, HIDDEN, "Q4_1"),
                self.pack(HIDDEN, INNER, "Q4_1"),
                (torch.ones(HIDDEN, dtype=ops.dtype), torch.ones(HIDDEN, dtype=ops.dtype)),
                torch.randn(pool).to(ops.dtype),
                torch.randn(pool).to(ops.dtype),
            )
            for _ in range(LAYERS)
        ]

    def pack(self, out_features: int, in_features: int, qtype: str) -> object:
        raw = random_blocks(out_features, in_features, qtype)
        if qtype not in self.linear.qtypes:
            return torch.randn(out_features, in_features).to(self.ops.dtype)
        self.weight_bytes += raw.numel()
        return self.linear.pack(raw, qtype, in_features)

    def project(self, x: torch.Tensor, weight: object) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return self.ops.linear(x, weight, None)
        return self.linear(x, weight, None)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        ops = self.ops
        residual = ops.embedding(ids, self.table)
        x: torch.Tensor | None = None
        for layer in self.layers:
            before, after = layer.norms
            y = ops.rms_norm(residual, before, EPS) if x is None else ops.add_rms_norm(x, residual, before, EPS)
            qkv = self.project(y, layer.qkv)
            q = ops.qkv_rope_cache(qkv, positions, self.cos_sin, layer.keys, layer.values, batch.slots, None, None, EPS)
            y = ops.paged_attention(q, layer.keys, layer.values, batch, HEAD_DIM**-0.5, None)
            y = ops.add_rms_norm(self.project(y, layer.out), residual, after, EPS)
            x = self.project(ops.silu_and_mul(self.project(y, layer.gate_up)), layer.down)
        assert x is not None
        return self.project(ops.add_rms_norm(x, residual, self.norm, EPS), self.head)


def make_batch(rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Row r's pages are consecutive; every request has `context` tokens, the new one included."""
    pages = -(-context // PAGE)
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    slots = table[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    start = torch.arange(rows + 1, dtype=torch.int32)
    lens = torch.full((rows,), context, dtype=torch.int32)
    batch = AttentionBatch(start, lens, table, slots, rows, rows, [1] * rows, [context] * rows)
    return torch.randint(0, VOCABULARY, (rows,)), torch.full((rows,), context - 1), batch


def times_ms(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Minimum and median."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8", help="batch sizes")
    parser.add_argument("--context", type=int, default=256, help="tokens a request")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--only", default=None, help="use this implementation name and the reference elsewhere")
    parser.add_argument("--bandwidth", type=float, default=27.0, help="GB/s that the machine reads")
    arguments = parser.parse_args()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    torch.manual_seed(0)
    ops, report = select_ops(Need(torch.device("cpu"), torch.bfloat16), arguments.only)
    print("\n".join(report))
    step = Step(ops, max(sizes) * -(-arguments.context // PAGE))
    results = []
    print(f"{'rows':>5} {'tape ms min/median':>20} {'eager ms min/median':>20} {'MB':>7} {'bound ms':>9}")
    for rows in sizes:
        inputs = make_batch(rows, arguments.context)
        read = step.weight_bytes + rows * arguments.context * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
        bound = read / arguments.bandwidth / 1e6
        tape_ms = (float("nan"),) * 2
        if ops.recorder is not None:
            with ops.recorder.record() as tape:
                step.run(*inputs)
            times_ms(tape.replay, 5)
            tape_ms = times_ms(tape.replay, arguments.repeats)
        times_ms(partial(step.run, *inputs), 3)
        eager_ms = times_ms(partial(step.run, *inputs), max(5, arguments.repeats // 3))
        print(
            f"{rows:5} {tape_ms[0]:12.2f} / {tape_ms[1]:5.2f} {eager_ms[0]:12.2f} / {eager_ms[1]:5.2f}"
            f" {read / 1e6:7.1f} {bound:9.2f}"
        )
        results.append({"rows": rows, "tape_ms": tape_ms, "eager_ms": eager_ms, "bytes": read, "bound_ms": bound})
    print(json.dumps({"context": arguments.context, "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
