"""The kernels around torch's attention for whole prompts: keys and values out of their pages, and sinks in place."""

from __future__ import annotations

import pytest
import torch
from attention_cases import attention_case
from kernel_device import DEVICE, KIND, ON_GPU, randn

from tokenspeed.kernels.triton import registered
from tokenspeed.kernels.triton.whole_prompts import LONG_PREFILL, apply_sinks, copy_pages


@pytest.mark.parametrize("stored", [KIND, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (3, 20)])
@pytest.mark.parametrize(("first", "count", "length"), [(0, 1, 37), (1, 2, 32), (2, 2, 5)])
def test_copies_are_what_the_pages_hold(
    first: int, count: int, length: int, heads: int, head_dim: int, stored: torch.dtype
) -> None:
    """Requests from the middle of a wider table on, and a last page that is not full."""
    page_size, num_pages = 16, 41
    keys, values = (randn(num_pages, page_size, heads, head_dim).to(stored) for _ in range(2))
    table = torch.randperm(num_pages, device=DEVICE)[:40].view(4, 10).int()[:, :7]  # rows lie 10 apart
    k, v = copy_pages(keys, values, table, first, count, length, KIND)
    pages = table[first : first + count, : -(-length // page_size)]
    for copy, pool in ((k, keys), (v, values)):
        expected = pool.to(KIND)[pages.long()].flatten(1, 2)[:, :length]
        assert copy.is_contiguous() and copy.dtype == KIND
        assert torch.equal(copy, expected)


def test_pages_beyond_a_prompt_are_not_read() -> None:
    """Their entries in the table are anything."""
    keys, values = randn(3, 16, 2, 32), randn(3, 16, 2, 32)
    table = torch.tensor([[2, 1, 2**30]], dtype=torch.int32, device=DEVICE)
    k, v = copy_pages(keys, values, table, 0, 1, 32, KIND)
    assert torch.equal(k[0], keys[[2, 1]].flatten(0, 1))
    assert torch.equal(v[0], values[[2, 1]].flatten(0, 1))


@pytest.mark.parametrize(
    ("dtype", "is_torchs"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_only_queries_of_16_bits_go_to_torch(
    dtype: torch.dtype, is_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with float32 torch kept all logits, [Hq, L, L], in the step by which memory is measured."""
    took: list[str] = []
    for name in ("attend_whole_prompts", "prefill_attention"):
        monkeypatch.setattr(registered, name, lambda q, *_, name=name, **__: took.append(name) or q.flatten(1))
    lens = [LONG_PREFILL]
    q, keys, values, batch = attention_case(lens, lens, (4, 2, 16), dtype, 16, None, DEVICE)
    registered.PagedAttention(DEVICE, ON_GPU)(q, keys, values, batch, 0.2, None)
    assert took == ["attend_whole_prompts" if is_torchs else "prefill_attention"]


@pytest.mark.parametrize("heads_outside", [False, True], ids=["tokens outside", "heads outside"])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 64), (45, 20), (96, 64)])
def test_sinks_take_their_share(length: int, head_dim: int, heads_outside: bool) -> None:
    count, heads = 2, 3
    if heads_outside:
        out = randn(count, heads, length, head_dim)
    else:
        out = randn(count, length, heads, head_dim).transpose(1, 2)
    log_sum = 3 * torch.randn(count, heads, length, device=DEVICE)
    sinks = 3 * torch.randn(heads, device=DEVICE)
    share = torch.sigmoid(log_sum - sinks[:, None]).unsqueeze(-1)
    expected = (out.float() * share).to(KIND)
    shaped = log_sum.unsqueeze(-1) if heads_outside else log_sum
    apply_sinks(out, shaped, sinks)
    torch.testing.assert_close(out, expected, atol=0.0, rtol=2**-7 if ON_GPU else 1e-6)


def test_sinks_change_nothing_else() -> None:
    """Neighbours in the memory around the rows stay."""
    around = randn(1, 2, 9, 40)
    before, out = around.clone(), around[:, :, 2:7, 8:28]
    apply_sinks(out, torch.zeros(1, 2, 5, device=DEVICE), torch.zeros(2, device=DEVICE))
    before[:, :, 2:7, 8:28] *= 0.5
    assert torch.equal(around, before)
