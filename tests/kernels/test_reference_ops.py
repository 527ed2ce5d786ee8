"""The reference operations against torch's and transformers' own functions, written another way."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference import pointwise
from tokenspeed.kernels.reference.attention import paged_attention, visible


def test_norms() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    torch.testing.assert_close(pointwise.rms_norm(x, weight, 1e-3), functional.rms_norm(x, (24,), weight, 1e-3))
    total = x + residual
    normed = pointwise.add_rms_norm(x, residual, weight, 1e-3)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, functional.rms_norm(total, (24,), weight, 1e-3))


def test_arithmetic_is_float32_inside() -> None:
    """4,096 squares of 9 add up to 331,776, beyond float16; half a unit in 256 small steps is lost in bfloat16."""
    x = torch.full((1, 4096), 9.0, dtype=torch.float16)
    assert torch.equal(pointwise.rms_norm(x, torch.ones(4096, dtype=torch.float16), 0.0), torch.ones_like(x))
    one = torch.cat((torch.ones(1, 1), torch.full((1, 256), 2.0**-9)), dim=1).bfloat16()
    assert float(pointwise.linear(one, torch.ones(1, 257).bfloat16(), None)) == 1.5  # bfloat16 adds would stay at 1


def test_silu_and_mul_takes_gate_first() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    ours = pointwise.silu_and_mul(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(ours, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("normed", [False, True])
def test_qkv_rope_cache_equals_transformers_rotary(normed: bool) -> None:
    q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    angles = torch.rand(20, 8) * 6
    positions, slots = torch.randint(0, 20, (6,)), torch.tensor([7, 0, 3, 11, 4, 9])
    q_norm, k_norm = (torch.randn(16), torch.randn(16)) if normed else (None, None)
    keys, values = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    turned = pointwise.qkv_rope_cache(qkv, positions, cos_sin, keys, values, slots, q_norm, k_norm, 1e-5)
    if q_norm is not None and k_norm is not None:
        q, k = functional.rms_norm(q, (16,), q_norm, 1e-5), functional.rms_norm(k, (16,), k_norm, 1e-5)
    twice = torch.cat((angles, angles), dim=1)[positions]
    wanted_q, wanted_k = apply_rotary_pos_emb(q[None], k[None], twice.cos()[None], twice.sin()[None], unsqueeze_dim=2)
    torch.testing.assert_close(turned, wanted_q[0])
    torch.testing.assert_close(keys.flatten(0, 1)[slots], wanted_k[0])
    torch.testing.assert_close(values.flatten(0, 1)[slots], v)
    untouched = [slot for slot in range(12) if slot not in slots]
    assert not keys.flatten(0, 1)[untouched].any()


def test_visible() -> None:
    assert visible(2, 4, None).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert visible(2, 4, 2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert visible(1, 3, 1).tolist() == [[False, False, True]]


@pytest.mark.parametrize("window", [None, 3])
def test_paged_attention_equals_contiguous_attention(window: int | None) -> None:
    """Two requests, one with a cached prefix, pages in disorder; without host lengths."""
    q, keys, values = torch.randn(7, 4, 8), torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    tables, query_lens, seq_lens = [[5, 0, 2], [1, 4, 0]], [2, 5], [10, 5]
    batch = AttentionBatch(
        query_start=torch.tensor([0, 2, 7], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.zeros(7, dtype=torch.int64),
        num_requests=2,
        num_tokens=7,
    )
    ours = paged_attention(q, keys, values, batch, 0.3, window)
    start = 0
    for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True):
        k, v = (torch.cat([pool[page] for page in table])[:seq_len].transpose(0, 1) for pool in (keys, values))
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        mine = q[start : start + query_len].transpose(0, 1)
        wanted = functional.scaled_dot_product_attention(
            mine, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), mask[-query_len:], scale=0.3
        )
        torch.testing.assert_close(ours[start : start + query_len], wanted.transpose(0, 1).flatten(1))
        start += query_len


def test_a_request_without_tokens_in_this_step_gets_no_row() -> None:
    batch = AttentionBatch(
        query_start=torch.tensor([0, 0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([3, 1], dtype=torch.int32),
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int64),
        num_requests=2,
        num_tokens=1,
    )
    pool = torch.randn(1, 4, 1, 8)
    torch.testing.assert_close(
        paged_attention(torch.randn(1, 2, 8), pool, pool, batch, 1.0, None)[0], pool[0, 0].repeat(1, 2)[0]
    )
