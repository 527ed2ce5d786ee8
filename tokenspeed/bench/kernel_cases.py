"""The shapes that a model gives every operation: inputs, bytes and operations. An op without an entry is not timed.

Decode rows R have one token each; a prefill row count is one prompt. Attention: `kernel_attention`, experts:
`expert_cases`, sampling, which is no operation of the registry: `kernel_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from tokenspeed.bench.expert_cases import (
    described,
    experts_bytes,
    experts_calls,
    experts_flop,
    moe_need,
    route_calls,
)
from tokenspeed.bench.kernel_attention import paged_attention_cases, qkv_rope_cache_cases
from tokenspeed.bench.kernel_sampling import SAMPLING, sampling_cases
from tokenspeed.bench.kernel_setting import EPS, Call, Case, NotTimed, Setting

CasesOf = Callable[[Setting, int, bool], Iterator[Case]]
"""Of an operation: setting, rows, whether they are decode rows."""
FP8_BLOCK = 128
BLOCKS = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}
"""GGUF types that are timed: bytes of scales and of codes in a block of 32 weights."""


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


def _norm(op_name: str, num_inputs: int) -> CasesOf:
    """A norm of one tensor, or of the sum of two; it writes as many as it reads."""

    def found(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
        hidden = at.config.hidden_size
        num_bytes = (2 * num_inputs * rows + 1) * hidden * at.element_bytes

        def make(op: Any) -> list[Call]:
            return [
                partial(op, *(at.random(rows, hidden) for _ in range(num_inputs)), at.random(hidden), EPS)
                for _ in at.copies(num_bytes)
            ]

        yield Case(op_name, f"{hidden}", rows, num_bytes, 0, make)

    return found


def _silu_and_mul(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    inner = at.config.intermediate_size
    num_bytes = 3 * rows * inner * at.element_bytes

    def make(op: Any) -> list[Call]:
        return [partial(op, at.random(rows, 2 * inner)) for _ in at.copies(num_bytes)]

    yield Case("silu_and_mul", f"2 x {inner}", rows, num_bytes, 0, make)


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
    """e4m3 weights with a scale an output row (`--quantization fp8`) or a block of 128 x 128 (published checkpoints),
    plain: any number of rows. The head stays dense, so it has no case."""
    for (name, inner, outer), is_block in product(_linears(at, False), (False, True)):
        scales = (-(-outer // FP8_BLOCK), -(-inner // FP8_BLOCK)) if is_block else (outer,)
        num_bytes = inner * outer + 4 * prod(scales) + rows * (inner + outer) * at.element_bytes

        def make(
            op: Any,
            inner: int = inner,
            outer: int = outer,
            num_bytes: int = num_bytes,
            scales: tuple[int, ...] = scales,
            is_block: bool = is_block,
        ) -> list[Call]:
            if (reason := op.why_not(inner, outer, is_block)) is not None:
                raise NotTimed(reason)
            return [
                partial(
                    op,
                    at.random(rows, inner),
                    at.random(outer, inner).to(torch.float8_e4m3fn),
                    torch.full(scales, 0.02, dtype=torch.float32, device=at.device),
                )
                for _ in at.copies(num_bytes)
            ]

        shape = f"{name} {inner} -> {outer} (scales by {'block' if is_block else 'row'})"
        yield Case("fp8_linear", shape, rows, num_bytes, 2 * rows * inner * outer, make)


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


_CASES: dict[str, CasesOf] = {
    "embedding": _embedding,
    "rms_norm": _norm("rms_norm", 1),
    "add_rms_norm": _norm("add_rms_norm", 2),
    "silu_and_mul": _silu_and_mul,
    "qkv_rope_cache": qkv_rope_cache_cases,
    "paged_attention": paged_attention_cases,
    "linear": _linear,
    "fused_linear": _fused_linear,
    "fp8_linear": _fp8_linear,
    "block_linear": _block_linear,
    "route": _route,
    "experts": _experts,
    SAMPLING: sampling_cases,
}
