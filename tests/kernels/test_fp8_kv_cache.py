"""An 8-bit KV pool: what is written, and that attention over it is attention over the dequantized pool.

On a CPU `reference` and `torch_cpu`, and Triton's kernels in the interpreter; on a GPU Triton's kernels for real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cpu import torch_cpu
from tokenspeed.kernels.reference import attention, pointwise
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.kernels.triton.pointwise import qkv_rope_cache as triton_rope_cache
from tokenspeed.kernels.triton.prefill_attention import prefill_attention
from tokenspeed.kernels.triton.registered import PagedAttention

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 32, 8
K_SCALE, V_SCALE = 0.25, 0.5

RopeCache = Callable[..., torch.Tensor]
ROPE: list[Any] = [pytest.param(lambda *a: triton_rope_cache(*a, pdl=ON_GPU), id="triton")]
ATTEND: list[Any] = [pytest.param(PagedAttention(DEVICE, ON_GPU), id="triton")]
if not ON_GPU:
    ROPE += [pytest.param(pointwise.qkv_rope_cache, id="reference"), pytest.param(torch_cpu.qkv_rope_cache, id="torch")]
    ATTEND += [pytest.param(torch_cpu.paged_attention, id="torch")]


def rope_inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
    angles = torch.rand(64, HEAD_DIM // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(4 * PAGE, generator=generator)[:num_tokens]
    return qkv.to(DEVICE, KIND), torch.arange(num_tokens, device=DEVICE), cos_sin.to(DEVICE), slots.to(DEVICE)


def pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(4, PAGE, KV_HEADS, HEAD_DIM, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("rope", ROPE)
def test_what_needs_no_rounding_is_stored_exactly(rope: RopeCache) -> None:
    """Each by its own scale. Without rotation, and on the e4m3 grid: the interpreter rounds 1.99 to 1."""
    qkv, positions, cos_sin, slots = rope_inputs(9)
    cos_sin = torch.cat((torch.ones_like(cos_sin[:, ::2]), torch.zeros_like(cos_sin[:, ::2])), dim=-1)
    grid = qkv.to(E4M3).to(KIND)
    heads = grid.view(9, -1, HEAD_DIM).clone()
    heads[:, HEADS : HEADS + KV_HEADS] *= K_SCALE
    heads[:, HEADS + KV_HEADS :] *= V_SCALE
    keys, values = pool(E4M3), pool(E4M3)
    rope(heads.view(9, -1), positions, cos_sin, keys, values, slots, None, None, 0.0, K_SCALE, V_SCALE)
    expected = grid.view(9, -1, HEAD_DIM).float()
    assert torch.equal(keys.view(-1, KV_HEADS, HEAD_DIM)[slots].float(), expected[:, HEADS : HEADS + KV_HEADS])
    assert torch.equal(values.view(-1, KV_HEADS, HEAD_DIM)[slots].float(), expected[:, HEADS + KV_HEADS :])


@pytest.mark.parametrize("rope", ROPE if ON_GPU else ROPE[1:])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (K_SCALE, V_SCALE)])
def test_what_is_written_times_its_scale_is_the_key_and_value(rope: RopeCache, scales: tuple[float, float]) -> None:
    qkv, positions, cos_sin, slots = rope_inputs(9)
    keys, values = pool(torch.float32), pool(torch.float32)
    q = pointwise.qkv_rope_cache(qkv.clone(), positions, cos_sin, keys, values, slots, None, None, 0.0)
    keys_8, values_8 = pool(E4M3), pool(E4M3)
    q_8 = rope(qkv.clone(), positions, cos_sin, keys_8, values_8, slots, None, None, 0.0, *scales)
    torch.testing.assert_close(q_8, q, rtol=2e-2, atol=2e-2)
    for stored, expected, scale in ((keys_8, keys, scales[0]), (values_8, values, scales[1])):
        wrong = (stored.float() * scale - expected).abs()
        assert (wrong <= expected.abs() * (2**-4 + 2**-8) + scale * 2**-10).all()
        assert wrong.max() > 0  # it was rounded at all


@pytest.mark.parametrize("rope", ROPE)
def test_what_is_beyond_448_is_cut_off_and_never_nan(rope: RopeCache) -> None:
    qkv, positions, cos_sin, slots = rope_inputs(5)
    keys, values = pool(E4M3), pool(E4M3)
    rope(qkv * 1e4, positions, cos_sin, keys, values, slots, None, None, 0.0)
    for stored in (keys.float(), values.float()):
        assert stored.isfinite().all()
        assert stored.max() == 448 and stored.min() == -448


def attention_inputs(query_lens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, Any, Any, AttentionBatch]:
    generator = torch.Generator().manual_seed(9)
    num_pages = sum(-(-length // PAGE) for length in seq_lens)
    keys, values = (
        torch.randn(num_pages, PAGE, KV_HEADS, HEAD_DIM, generator=generator).to(E4M3).to(DEVICE) for _ in range(2)
    )
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.zeros(len(seq_lens), max(-(-length // PAGE) for length in seq_lens), dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        for column in range(-(-length // PAGE)):
            table[row, column] = order.pop()
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, generator=generator).to(DEVICE, KIND)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    batch = AttentionBatch(
        query_start=starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE),
        slots=torch.zeros(len(q), dtype=torch.int64, device=DEVICE),
        num_requests=len(seq_lens),
        num_tokens=len(q),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return q, keys, values, batch


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        pytest.param([1, 1, 1], [5, 19, 32], id="decode"),
        pytest.param([7, 1, 12], [7, 20, 30], id="mixed"),
    ],
)
def test_attention_over_an_8_bit_pool(attend: Any, query_lens: list[int], seq_lens: list[int]) -> None:
    q, keys, values, batch = attention_inputs(query_lens, seq_lens)
    scale = HEAD_DIM**-0.5
    dense = (keys.float() * K_SCALE, values.float() * V_SCALE)
    expected = attention.paged_attention(q.cpu().float(), *(x.cpu() for x in dense), on_cpu(batch), scale, None)
    got = attend(q, keys, values, batch, scale * K_SCALE, None, V_SCALE)
    assert got.dtype == q.dtype
    difference = (got.cpu().float() - expected).norm() / expected.norm()
    assert difference < (1e-2 if ON_GPU else 1e-3)


def on_cpu(batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(
        query_start=batch.query_start.cpu(),
        seq_lens=batch.seq_lens.cpu(),
        page_table=batch.page_table.cpu(),
        slots=batch.slots.cpu(),
        num_requests=batch.num_requests,
        num_tokens=batch.num_tokens,
    )


def test_the_reference_takes_the_scales_as_well() -> None:
    q, keys, values, batch = attention_inputs([3, 1], [10, 9])
    q, keys, values, batch = q.cpu().float(), keys.cpu(), values.cpu(), on_cpu(batch)
    dense = attention.paged_attention(q, keys.float() * K_SCALE, values.float() * V_SCALE, batch, 0.2, None)
    got = attention.paged_attention(q, keys, values, batch, 0.2 * K_SCALE, None, V_SCALE)
    torch.testing.assert_close(got, dense)


def test_prefill_with_one_scale_is_the_same_twice() -> None:
    """`out_scale` multiplies, nothing else: twice the scale, twice the result."""
    q, keys, values, batch = attention_inputs([6], [14])
    args = (q, keys, values, batch.page_table, batch.query_start, batch.seq_lens, 6, 0.2)
    assert torch.equal(prefill_attention(*args, out_scale=2.0), prefill_attention(*args) * 2)


def test_native_kernels_refuse_an_8_bit_pool_with_a_reason() -> None:
    ops, report = select_ops(Need(torch.device("cpu"), torch.bfloat16, E4M3))
    assert ops.kv_dtype == E4M3
    (first, second) = (line for line in report if line.startswith(("qkv_rope_cache", "paged_attention")))
    assert second.startswith("paged_attention: torch_cpu (not native_cpu: as for ")
    if "as for embedding" not in second:  # there is a C compiler
        assert "keeps keys and values in bfloat16, not float8_e4m3fn" in first
