"""The shapes that a model gives every operation: inputs, bytes and operations. An op without an entry is not timed.

Each case makes several calls over different memory, 256 MiB together but at most 64 calls: more than a GPU's cache or a
core's own caches hold, so that weights and pages come from memory as they do between the layers of a model. Small
activations stay in the caches, as they do there. Decode rows R have one token each; a prefill row count is one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.bench.expert_cases import (
    described,
    experts_bytes,
    experts_calls,
    experts_flop,
    moe_need,
    route_calls,
)
from tokenspeed.config.model import ModelConfig

CACHE_BYTES = 2**28
MAX_COPIES = 64
EPS = 1e-6
BLOCKS = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}
"""GGUF types that are timed: bytes of scales and of codes in a block of 32 weights."""

Call = Callable[[], object]


class NotTimed(Exception):
    """This implementation does not take this shape; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape.

    Fields:
        shape: in words.
        rows: tokens.
        num_bytes: what must be read and written. flop: operations.
        make: an implementation's callable -> calls to time. Raises NotTimed.
    """

    op: str
    shape: str
    rows: int
    num_bytes: int
    flop: int
    make: Callable[[Any], list[Call]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the cases are made for.

    Fields:
        context_len: tokens a decoding request has. page_size: tokens a page.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    decode_rows: tuple[int, ...]
    prefill_lens: tuple[int, ...]
    context_len: int
    page_size: int

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (in_features, out_features) of a layer's matrices, and the head."""
        config = self.config
        heads, width = config.num_heads * config.head_dim, (config.num_heads + 2 * config.num_kv_heads)
        found = {"qkv": (config.hidden_size, width * config.head_dim), "o": (heads, config.hidden_size)}
        if config.moe is None or config.moe.dense_layers:
            found["gate_up"] = (config.hidden_size, 2 * config.intermediate_size)
            found["down"] = (config.intermediate_size, config.hidden_size)
        return found | {"head": (config.hidden_size, config.vocab_size)}

    def random(self, *shape: int) -> torch.Tensor:
        """Normal random numbers in the model's dtype."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def copies(self, num_bytes: int) -> range:
        """One index for each copy of inputs of that size."""
        return range(max(1, min(MAX_COPIES, -(-CACHE_BYTES // max(1, num_bytes)))))


def cases(setting: Setting, op: str) -> list[Case] | None:
    """An operation's cases, or None for an operation that has no entry here."""
    if op not in _CASES:
        return None
    found = [case for rows in setting.decode_rows for case in _CASES[op](setting, rows, True)]
    return found + [case for rows in setting.prefill_lens for case in _CASES[op](setting, rows, False)]


def _embedding(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    vocab, hidden = at.config.vocab_size, at.config.hidden_size
    num_bytes = rows * (2 * hidden * at.element_bytes + 8)

    def make(op: Any) -> list[Call]:
        table = at.random(vocab, hidden)
        return [
            partial(op, torch.randint(0, vocab, (rows,), device=at.device), table)
            for _ in at.copies(num_bytes)
        ]  # fmt: skip

    yield Case("embedding", f"[{vocab}, {hidden}]", rows, num_bytes, 0, make)


def _rms_norm(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    hidden = at.config.hidden_size
    num_bytes = (2 * rows + 1) * hidden * at.element_bytes

    def make(op: Any) -> list[Call]:
        return [partial(op, at.random(rows, hidden), at.random(hidden), EPS) for _ in at.copies(num_bytes)]

    yield Case("rms_norm", f"{hidden}", rows, num_bytes, 0, make)


def _add_rms_norm(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    hidden = at.config.hidden_size
    num_bytes = (4 * rows + 1) * hidden * at.element_bytes

    def make(op: Any) -> list[Call]:
        return [
            partial(op, at.random(rows, hidden), at.random(rows, hidden), at.random(hidden), EPS)
            for _ in at.copies(num_bytes)
        ]

    yield Case("add_rms_norm", f"{hidden}", rows, num_bytes, 0, make)


def _silu_and_mul(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    inner = at.config.intermediate_size
    num_bytes = 3 * rows * inner * at.element_bytes

    def make(op: Any) -> list[Call]:
        return [partial(op, at.random(rows, 2 * inner)) for _ in at.copies(num_bytes)]

    yield Case("silu_and_mul", f"2 x {inner}", rows, num_bytes, 0, make)


def _qkv_rope_cache(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    config = at.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    width = (heads + 2 * kv_heads) * dim
    num_bytes = rows * (2 * width * at.element_bytes + 4 * dim + 16)

    def make(op: Any) -> list[Call]:
        cos_sin = torch.rand(config.max_position, dim, device=at.device)
        norms = [at.random(dim) if config.qk_norm else None for _ in range(2)]
        num_pages = -(-rows // at.page_size)
        calls: list[Call] = []
        for _ in at.copies(num_bytes):
            keys, values = (at.random(num_pages, at.page_size, kv_heads, dim) for _ in range(2))
            positions = torch.randint(0, config.max_position, (rows,), device=at.device)
            slots = torch.randperm(num_pages * at.page_size, device=at.device)[:rows]
            calls.append(partial(op, at.random(rows, width), positions, cos_sin, keys, values, slots, *norms, EPS))
        return calls

    yield Case("qkv_rope_cache", f"{heads}+2x{kv_heads} heads of {dim}", rows, num_bytes, 0, make)


def _paged_attention(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    config = at.config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    num_requests, query_len, seq_len = (rows, 1, at.context_len) if is_decode else (1, rows, rows)
    pairs = num_requests * (seq_len if is_decode else rows * (rows + 1) // 2)
    num_bytes = 2 * (num_requests * seq_len * kv_heads + rows * heads) * dim * at.element_bytes

    def make(op: Any) -> list[Call]:
        pages = -(-seq_len // at.page_size)
        scale = dim**-0.5
        calls: list[Call] = []
        for _ in at.copies(num_bytes):
            batch = _batch(at, num_requests, query_len, seq_len)
            keys, values = (at.random(num_requests * pages, at.page_size, kv_heads, dim) for _ in range(2))
            calls.append(partial(op, at.random(rows, heads, dim), keys, values, batch, scale, None))
        return calls

    what = f"decode, context {seq_len}" if is_decode else "one prompt"
    shape = f"{heads}/{kv_heads} heads of {dim}, {what}"
    yield Case("paged_attention", shape, rows, num_bytes, 4 * pairs * heads * dim, make)


def _batch(at: Setting, num_requests: int, query_len: int, seq_len: int) -> AttentionBatch:
    """Equal requests whose pages lie scattered; the queries are each request's last tokens."""
    pages = -(-seq_len // at.page_size)
    table = torch.randperm(num_requests * pages, device=at.device).view(num_requests, pages)
    new = torch.arange(seq_len - query_len, seq_len, device=at.device)
    slots = table[:, new // at.page_size] * at.page_size + new % at.page_size
    return AttentionBatch(
        query_start=torch.arange(0, (num_requests + 1) * query_len, query_len, dtype=torch.int32, device=at.device),
        seq_lens=torch.full((num_requests,), seq_len, dtype=torch.int32, device=at.device),
        page_table=table.to(torch.int32),
        slots=slots.flatten(),
        num_requests=num_requests,
        num_tokens=num_requests * query_len,
        query_lens_host=[query_len] * num_requests,
        seq_lens_host=[seq_len] * num_requests,
    )


def _linears(at: Setting, is_decode: bool) -> Iterator[tuple[str, int, int]]:
    """(name, in, out); of a prompt only the last row reaches the head."""
    for name, (inner, outer) in at.linears.items():
        if is_decode or name != "head":
            yield name, inner, outer


def _linear(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    for name, inner, outer in _linears(at, is_decode):
        num_bytes = (inner * outer + rows * (inner + outer)) * at.element_bytes

        def make(op: Any, inner: int = inner, outer: int = outer, num_bytes: int = num_bytes) -> list[Call]:
            return [
                partial(op, at.random(rows, inner), at.random(outer, inner), None) for _ in at.copies(num_bytes)
            ]  # fmt: skip

        yield Case("linear", f"{name} {inner} -> {outer}", rows, num_bytes, 2 * rows * inner * outer, make)


def _fused_linear(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """What a decode step asks of it: norm before qkv, gate_up and head; addition after o and down."""
    for name, inner, outer in _linears(at, is_decode):
        adds, gated = name in ("o", "down"), name == "gate_up"
        written = outer // 2 if gated else outer
        num_bytes = (inner * outer + rows * (inner + written * (2 if adds else 1))) * at.element_bytes

        def make(
            op: Any,
            inner: int = inner,
            outer: int = outer,
            num_bytes: int = num_bytes,
            adds: bool = adds,
            gated: bool = gated,
        ) -> list[Call]:
            if rows > op.max_rows:
                raise NotTimed(f"takes at most {op.max_rows} rows")
            if (reason := op.why_not(inner)) is not None:
                raise NotTimed(reason)
            return [
                partial(
                    op,
                    at.random(rows, inner),
                    at.random(outer, inner),
                    norm=None if adds else at.random(inner),
                    eps=EPS,
                    residual=at.random(rows, outer) if adds else None,
                    gated=gated,
                )
                for _ in at.copies(num_bytes)
            ]

        extra = "add" if adds else "norm, gated" if gated else "norm"
        shape = f"{name} {inner} -> {outer} ({extra})"
        yield Case("fused_linear", shape, rows, num_bytes, 2 * rows * inner * outer, make)


def _fp8_linear(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """e4m3 weights with a scale an output row, plain: any number of rows. The head stays dense, so it has no case."""
    for name, inner, outer in _linears(at, False):
        num_bytes = inner * outer + 4 * outer + rows * (inner + outer) * at.element_bytes

        def make(op: Any, inner: int = inner, outer: int = outer, num_bytes: int = num_bytes) -> list[Call]:
            if (reason := op.why_not(inner, outer, False)) is not None:
                raise NotTimed(reason)
            return [
                partial(
                    op,
                    at.random(rows, inner),
                    at.random(outer, inner).to(torch.float8_e4m3fn),
                    torch.full((outer,), 0.02, dtype=torch.float32, device=at.device),
                )
                for _ in at.copies(num_bytes)
            ]

        yield Case("fp8_linear", f"{name} {inner} -> {outer}", rows, num_bytes, 2 * rows * inner * outer, make)


def _block_linear(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    for qtype, (scales, codes) in BLOCKS.items():
        for name, inner, outer in _linears(at, is_decode):
            if inner % 32:
                continue
            raw_bytes = outer * inner // 32 * (scales + codes)
            num_bytes = raw_bytes + rows * (inner + outer) * at.element_bytes

            def make(
                op: Any, qtype: str = qtype, inner: int = inner, outer: int = outer, raw_bytes: int = raw_bytes
            ) -> list[Call]:
                if qtype not in op.qtypes:
                    raise NotTimed(f"does not take {qtype}")
                if rows > op.max_rows:
                    raise NotTimed(f"takes at most {op.max_rows} rows")
                packed = [op.pack(_blocks(qtype, outer, inner), qtype, inner) for _ in at.copies(raw_bytes)]
                return [partial(op, at.random(rows, inner), weight, None) for weight in packed]

            shape = f"{qtype} {name} {inner} -> {outer}"
            yield Case("block_linear", shape, rows, num_bytes, 2 * rows * inner * outer, make)


def _blocks(qtype: str, outer: int, inner: int) -> torch.Tensor:
    """GGUF rows of random codes. The scales are small and finite: random bits would be NaN now and then."""
    scales, codes = BLOCKS[qtype]
    blocks = torch.randint(0, 256, (outer, inner // 32, scales + codes), dtype=torch.uint8)
    blocks[..., :scales] = torch.full((scales // 2,), 0.002, dtype=torch.float16).view(torch.uint8)
    return blocks.view(outer, -1)


def _experts(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    need = moe_need(at.config, at.device, at.dtype)
    if need is None:
        return
    num_bytes = experts_bytes(need, rows)

    def make(op: Any) -> list[Call]:
        made = experts_calls(op, need, rows, len(at.copies(num_bytes)), at.device)
        if isinstance(made, str):
            raise NotTimed(made)
        return made

    yield Case("experts", described(need), rows, num_bytes, experts_flop(need, rows), make)


def _route(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    need = moe_need(at.config, at.device, at.dtype)
    if need is None:
        return
    hidden, num_experts = need.hidden_size, need.num_experts
    num_bytes = (num_experts + 2 * rows) * hidden * at.element_bytes + 8 * rows * need.top_k

    def make(op: Any) -> list[Call]:
        return route_calls(op, at.config, need, rows, len(at.copies(num_bytes)), at.device)

    shape = f"{need.top_k} of {num_experts}, {hidden}"
    yield Case("route", shape, rows, num_bytes, 2 * rows * hidden * num_experts, make)


_CASES: dict[str, Callable[[Setting, int, bool], Iterator[Case]]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "qkv_rope_cache": _qkv_rope_cache,
    "paged_attention": _paged_attention,
    "linear": _linear,
    "fused_linear": _fused_linear,
    "fp8_linear": _fp8_linear,
    "block_linear": _block_linear,
    "route": _route,
    "experts": _experts,
}
