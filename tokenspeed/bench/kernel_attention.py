"""Cases of `paged_attention` and `qkv_rope_cache` for `kernel_cases`: the steps, windows, sinks and pools of a model.

Steps are those that an engine runs: R requests that decode; a whole prompt; a chunk of a prompt after earlier context;
and decoding requests beside a prompt. Layers that differ in their window are cases of their own.

Positions of a request, half-open:   [0, seq_len - query_len) earlier context   [seq_len - query_len, seq_len) this step
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.bench.kernel_setting import EPS, Call, Case, Setting

DECODES_BESIDE = 16
"""Decoding requests of the step that has a prompt too."""


def qkv_rope_cache_cases(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """Of `rows` tokens."""
    config = at.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    width = (heads + 2 * kv_heads) * dim
    written = heads * dim * at.element_bytes + 2 * kv_heads * dim * at.pool_dtype.itemsize
    num_bytes = rows * (width * at.element_bytes + written + 4 * dim + 16)

    def make(op: Any) -> list[Call]:
        cos_sin = torch.rand(config.max_position, dim, device=at.device)
        norms = [at.random(dim) if config.qk_norm else None for _ in range(2)]
        num_pages = -(-rows // at.page_size)
        calls: list[Call] = []
        for _ in at.copies(num_bytes):
            keys, values = at.pool(num_pages)
            positions = torch.randint(0, config.max_position, (rows,), device=at.device)
            slots = torch.randperm(num_pages * at.page_size, device=at.device)[:rows]
            calls.append(partial(op, at.random(rows, width), positions, cos_sin, keys, values, slots, *norms, EPS))
        return calls

    yield Case("qkv_rope_cache", f"{heads}+2x{kv_heads} heads of {dim}{_pool(at)}", rows, num_bytes, 0, make)


def paged_attention_cases(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """Steps of `rows` tokens, for every window that layers of the model have."""
    context = at.context_len
    if is_decode:
        steps = {f"decode, context {context}": ([1] * rows, [context] * rows)}
    else:
        steps = {"one prompt": ([rows], [rows]), f"a chunk after {context}": ([rows], [context + rows])}
        if rows > DECODES_BESIDE:
            prompt = rows - DECODES_BESIDE
            lens = [1] * DECODES_BESIDE + [prompt], [context] * DECODES_BESIDE + [prompt]
            steps[f"a prompt beside {DECODES_BESIDE} decodes of {context}"] = lens
    for what, (query_lens, seq_lens) in steps.items():
        for window in dict.fromkeys(at.config.layer_windows or (None,)):
            yield _attention(at, what, query_lens, seq_lens, window)


def _attention(at: Setting, what: str, query_lens: list[int], seq_lens: list[int], window: int | None) -> Case:
    config, rows = at.config, sum(query_lens)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    kept = 2 * kv_heads * dim * at.pool_dtype.itemsize
    requests = list(zip(query_lens, seq_lens, strict=True))
    num_bytes = sum(_read(*lens, window) for lens in requests) * kept + 2 * rows * heads * dim * at.element_bytes
    flop = 4 * sum(_pairs(*lens, window) for lens in requests) * heads * dim

    def make(op: Any) -> list[Call]:
        sinks = torch.randn(heads, device=at.device) if config.attention_sinks else None
        calls: list[Call] = []
        for _ in at.copies(num_bytes):
            batch, num_pages = _batch(at, query_lens, seq_lens)
            keys, values = at.pool(num_pages)
            q = at.random(rows, heads, dim)
            calls.append(partial(op, q, keys, values, batch, dim**-0.5, window, 1.0, sinks))
        return calls

    notes = ("" if window is None else f", window {window}") + (", sinks" if config.attention_sinks else "") + _pool(at)
    return Case("paged_attention", f"{heads}/{kv_heads} heads of {dim}, {what}{notes}", rows, num_bytes, flop, make)


def _pool(at: Setting) -> str:
    return "" if at.pool_dtype == at.dtype else f", {str(at.pool_dtype).removeprefix('torch.')} cache"


def _read(query_len: int, seq_len: int, window: int | None) -> int:
    """Positions that any of a request's queries sees."""
    return seq_len if window is None else min(seq_len, query_len - 1 + window)


def _pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """(query, visible position) pairs of a request."""
    seen = range(seq_len - query_len + 1, seq_len + 1)
    return sum(seen) if window is None else sum(min(count, window) for count in seen)


def _batch(at: Setting, query_lens: list[int], seq_lens: list[int]) -> tuple[AttentionBatch, int]:
    """Requests whose pages lie scattered, and the number of pages; the queries are each request's last tokens."""
    pages_of = [-(-seq_len // at.page_size) for seq_len in seq_lens]
    order = torch.randperm(sum(pages_of), device=at.device)
    table = torch.zeros(len(seq_lens), max(pages_of), dtype=torch.int64, device=at.device)
    slots, first = [], 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        table[r, : pages_of[r]] = order[first : first + pages_of[r]]
        first += pages_of[r]
        new = torch.arange(seq_len - query_len, seq_len, device=at.device)
        slots.append(table[r, new // at.page_size] * at.page_size + new % at.page_size)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=at.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=at.device),
        page_table=table.to(torch.int32),
        slots=torch.cat(slots),
        num_requests=len(seq_lens),
        num_tokens=sum(query_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return batch, sum(pages_of)
