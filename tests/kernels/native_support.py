"""What the tests of the native CPU kernels share: contexts of both builds, random batches, an fp32 truth in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cpu.native.build import build, find_compiler
from tokenspeed.kernels.cpu.native.context import NativeContext
from tokenspeed.kernels.cpu.native.library import Library

BF16 = torch.bfloat16
BUILDS = ("tuned", "portable")
HALF_FIELDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Byte offsets of half-precision numbers in a block; random bytes there would be infinities."""

HAS_COMPILER = find_compiler() is not None


def refuse(op: str) -> Callable[..., Any]:
    """No fallback: a test of a native form must not pass by way of torch."""

    def serve(*given: Any) -> Any:
        raise AssertionError(f"{op} was passed on")

    return serve


@cache
def context(build_name: str, num_threads: int = 2) -> NativeContext:
    """A context without fallback."""
    flags = ("-DTS_PORTABLE",) if build_name == "portable" else ()
    return NativeContext(Library(build(flags), num_threads), refuse)


def random_blocks(qtype: str, out_features: int, in_features: int) -> torch.Tensor:
    """Random GGUF rows, uint8 [out, row bytes]."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    raw = torch.randint(0, 256, (out_features, in_features // block, size), dtype=torch.uint8)
    for at in HALF_FIELDS[qtype]:
        numbers = (torch.randn(out_features, in_features // block) * 0.01).to(torch.float16)
        raw[..., at : at + 2] = numbers.unsqueeze(-1).view(torch.uint8)
    return raw.view(out_features, -1)


def dequantized(raw: torch.Tensor, qtype: str) -> torch.Tensor:
    """By the `gguf` package, float32 [out, in]."""
    values: np.ndarray = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[qtype])
    return torch.from_numpy(values.astype(np.float32))


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth||."""
    return float((out.double() - truth.double()).norm() / truth.double().norm())


def paged_batch(
    query_lens: list[int], seq_lens: list[int], page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random keys and values on shuffled pages; everything that no request may read is NaN."""
    pages = [-(-length // page_size) for length in seq_lens]
    order = torch.randperm(sum(pages) + 3)
    num_pages = len(order)
    keys = torch.full((num_pages, page_size, num_kv_heads, head_dim), float("nan"), dtype=BF16)
    values = torch.full_like(keys, float("nan"))
    table = torch.full((len(seq_lens), max([*pages, 1]) + 2), 0x7FFFFFFF, dtype=torch.int32)
    slots: list[torch.Tensor] = []
    taken = 0
    for r, length in enumerate(seq_lens):
        mine = order[taken : taken + pages[r]]
        taken += pages[r]
        table[r, : pages[r]] = mine.to(torch.int32)
        positions = torch.arange(length)
        flat = mine[positions // page_size] * page_size + positions % page_size
        keys.view(-1, num_kv_heads, head_dim)[flat] = torch.randn(length, num_kv_heads, head_dim).to(BF16)
        values.view(-1, num_kv_heads, head_dim)[flat] = torch.randn(length, num_kv_heads, head_dim).to(BF16)
        slots.append(flat[length - query_lens[r] :])
    start = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    batch = AttentionBatch(
        start, torch.tensor(seq_lens, dtype=torch.int32), table, torch.cat(slots), len(seq_lens), sum(query_lens)
    )
    return keys, values, batch


def attention_truth(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query and head at a time, float32."""
    num_heads, group = q.shape[1], q.shape[1] // keys.shape[2]
    page_size = keys.shape[1]
    out = torch.zeros(q.shape[0], num_heads, q.shape[2])
    for r in range(batch.num_requests):
        first, last = int(batch.query_start[r]), int(batch.query_start[r + 1])
        for t in range(first, last):
            limit = int(batch.seq_lens[r]) - (last - t) + 1
            positions = torch.arange(0 if window is None else max(0, limit - window), limit)
            if limit < 1:
                continue
            pages = batch.page_table[r][positions // page_size].long()
            k = keys[pages, positions % page_size].float()
            v = values[pages, positions % page_size].float()
            for h in range(num_heads):
                logits = k[:, h // group] @ q[t, h].float() * scale
                if sinks is not None:
                    logits = torch.cat((logits, sinks[h : h + 1]))
                out[t, h] = torch.softmax(logits, dim=0)[: len(positions)] @ v[:, h // group]
    return out.flatten(1)
