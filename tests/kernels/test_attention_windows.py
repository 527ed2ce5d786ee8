"""Triton attention with sliding windows and sinks over a pool where all that is out of sight is NaN.

On a GPU at the shapes that engines use; elsewhere the same code in Triton's interpreter at small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import attention_case
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.reference import attention
from tokenspeed.kernels.triton import prefill_attention as prefill
from tokenspeed.kernels.triton import registered, whole_prompts
from tokenspeed.kernels.triton.decode_attention import (
    DecodeTile,
    choose_decode_tile,
    decode_attention,
    decode_workspace,
    fitting_decode_tile,
)
from tokenspeed.kernels.triton.registered import PagedAttention

BOUND = 1e-2 if torch.bfloat16 == KIND else 5e-6
HEADS = [(4, 2, 16)] + ([(64, 8, 64), (32, 8, 128)] if ON_GPU else [(8, 1, 64)])
PAGE = 16
VIEWS = [(None, False), (None, True), (1, True), (7, False), (7, True), (PAGE, False), (1000, True)]
VIEWS += [(128, False), (128, True)] if ON_GPU else []
"""Windows, and whether there are sinks."""
LONGEST = 900 if ON_GPU else 75


@dataclass
class Pages:
    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def check(ours: torch.Tensor, truth: torch.Tensor) -> None:
    assert ours.shape == truth.shape
    assert float((ours.double() - truth.double()).norm() / truth.double().norm()) < BOUND


def some_sinks(num_heads: int, has_sinks: bool) -> torch.Tensor | None:
    return torch.randn(num_heads, device=DEVICE) * 3 if has_sinks else None


@pytest.mark.parametrize(("window", "has_sinks"), VIEWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode(heads: tuple[int, int, int], window: int | None, has_sinks: bool) -> None:
    seq_lens = [1, 16, 17, LONGEST]
    q, keys, values, batch = attention_case([1] * 4, seq_lens, heads, KIND, PAGE, window, DEVICE)
    sinks = some_sinks(heads[0], has_sinks)
    truth = attention.paged_attention(q, keys, values, batch, 0.2, window, 1.0, sinks)
    check(PagedAttention(DEVICE, ON_GPU)(q, keys, values, batch, 0.2, window, 1.0, sinks), truth)
    for tile in (DecodeTile(2, 32, 4, 3), DecodeTile(3, 16, 4, 2)):
        workspace = decode_workspace(4, *heads, tile.num_splits, DEVICE)
        out = decode_attention(
            q, keys, values, batch.page_table, batch.seq_lens, 0.2, workspace, tile, window, sinks, pdl=ON_GPU
        )
        check(out, truth)


@pytest.mark.parametrize(("window", "has_sinks"), VIEWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill(
    heads: tuple[int, int, int], window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, later chunks, and decode rows among them; also as a recorded step, with rows to spare."""
    query_lens, seq_lens = ([1, 300, 33, 700], [900, 300, 400, 711]) if ON_GPU else ([1, 36, 18], [70, 36, 75])
    if not ON_GPU:
        monkeypatch.setattr("tokenspeed.kernels.triton.registered.prefill_attention", small_blocks)
    q, keys, values, batch = attention_case(query_lens, seq_lens, heads, KIND, PAGE, window, DEVICE)
    sinks = some_sinks(heads[0], has_sinks)
    truth = attention.paged_attention(q, keys, values, batch, 0.2, window, 1.0, sinks)
    attend = PagedAttention(DEVICE, ON_GPU)
    check(attend(q, keys, values, batch, 0.2, window, 1.0, sinks), truth)
    batch.query_lens_host = batch.seq_lens_host = None
    q = torch.cat((q, q[:3]))
    batch.num_tokens = len(q)
    out = attend(q, keys, values, batch, 0.2, window, 1.0, sinks)
    check(out[:-3], truth)
    assert not out[-3:].any()


@pytest.mark.parametrize("query_lens", [[1] * 3, [1, 36, 18]], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("limit", [8 * 1024, 24 * 1024])
def test_tiles_of_less_shared_memory_give_the_same(
    limit: int, window: int | None, query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So little that a short head has the tiles which a long one has on a small GPU."""
    monkeypatch.setattr(registered, "shared_bytes", lambda device: limit)
    q, keys, values, batch = attention_case(query_lens, [70, 36, 75], (4, 2, 64), KIND, PAGE, window, DEVICE)
    usual = choose_decode_tile(6, 64, window)
    assert fitting_decode_tile(usual, q, keys, limit) != usual or limit > 8 * 1024
    truth = attention.paged_attention(q, keys, values, batch, 0.2, window, 1.0, None)
    check(PagedAttention(DEVICE, ON_GPU)(q, keys, values, batch, 0.2, window), truth)


def small_blocks(*given: object, **named: object) -> torch.Tensor:
    """So that a short case has several."""
    return prefill.prefill_attention(*given, **named, tile=prefill.PrefillTile(32, 32, 4, 2))


@pytest.mark.parametrize("route", ["torch", "triton"])
def test_whole_prompts_with_sinks(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention corrected by its log-sum-exp, and the Triton kernel where torch gives none."""
    if not ON_GPU:
        monkeypatch.setattr(whole_prompts, "LONG_PREFILL", 20)
        monkeypatch.setattr(whole_prompts, "DTYPES", (KIND,))
        monkeypatch.setattr("tokenspeed.kernels.triton.registered.prefill_attention", small_blocks)
    if route == "triton":
        monkeypatch.setattr(whole_prompts, "_with_log_sum", lambda *given: None)
    elif not ON_GPU:
        monkeypatch.setattr(whole_prompts, "_with_log_sum", log_sum_on_cpu)
    lens = [600, 600, 513] if ON_GPU else [40, 40, 21]
    heads = HEADS[1]
    q, keys, values, batch = attention_case(lens, lens, heads, KIND, PAGE, None, DEVICE)
    sinks = some_sinks(heads[0], True)
    if ON_GPU and route == "torch":
        found = whole_prompts.attend_whole_prompts(q, keys, values, batch, 0.2, sinks)
        assert found is not None, "neither cuDNN nor FlashAttention takes these shapes"
    truth = attention.paged_attention(q, keys, values, batch, 0.2, None, 1.0, sinks)
    check(PagedAttention(DEVICE, ON_GPU)(q, keys, values, batch, 0.2, None, 1.0, sinks), truth)


def log_sum_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU's operation of the same kind, with the log-sum-exp as cuDNN shapes it."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, log_sum.unsqueeze(-1)


def test_a_row_without_context_becomes_zeros() -> None:
    q, keys, values, batch = attention_case([1, 1], [5, 40], (4, 2, 16), KIND, PAGE, None, DEVICE)
    batch.seq_lens[0] = 0
    for num_splits in (1, 3):
        tile = DecodeTile(num_splits, 16, 4, 3)
        workspace = decode_workspace(2, 4, 2, 16, num_splits, DEVICE)
        for sinks in (None, some_sinks(4, True)):
            out = decode_attention(
                q, keys, values, batch.page_table, batch.seq_lens, 0.2, workspace, tile, None, sinks, pdl=ON_GPU
            )
            assert not out[0].any() and out[1].all()
