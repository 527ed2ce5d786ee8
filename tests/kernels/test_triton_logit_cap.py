"""The Triton `paged_attention` op with a logit cap: decode, several tokens a request, whole prompts, an 8-bit pool.

On a GPU, or in Triton's interpreter. The CPU's implementations: test_ops_contract.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import attention_case
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.attention.triton import TritonAttentionBackend
from tokenspeed.kernels.reference.attention import paged_attention
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.kernels.triton import whole_prompts
from tokenspeed.kernels.triton.registered import PagedAttention

BOUND = 1e-2 if torch.bfloat16 == KIND else 5e-6
HEADS = (4, 2, 64)
STEPS = {
    "decode": ([1, 1, 1], [33, 1, 70]),
    "mixed": ([1, 20, 1, 7], [33, 20, 5, 50]),
    "whole prompts": ([24, 24, 31], [24, 24, 31]),
}
CAP = 1.5


@dataclass
class Pages:
    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_the_op_caps_logits(step: str, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts too, though torch's attention, which otherwise serves them, has no cap."""
    monkeypatch.setattr(whole_prompts, "LONG_PREFILL", 16)
    monkeypatch.setattr(whole_prompts, "DTYPES", (KIND,))
    q, keys, values, batch = attention_case(*STEPS[step], HEADS, KIND, 16, window, DEVICE)
    sinks = torch.randn(HEADS[0], device=DEVICE) if has_sinks else None
    given = q, keys, values, batch, 0.3, window, 1.0, sinks
    truth = paged_attention(*given, CAP)
    assert apart(paged_attention(*given), truth) > 0.1, "the cap changes nothing here"
    assert apart(PagedAttention(DEVICE, ON_GPU)(*given, CAP), truth) < BOUND


@pytest.mark.parametrize("step", STEPS)
def test_the_backend_passes_it_on_with_the_scales_of_an_8_bit_pool(step: str) -> None:
    q, keys, values, batch = attention_case(*STEPS[step], HEADS, KIND, 16, None, DEVICE)
    pages = Pages(keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn), 0.7, 1.9)
    ops, _ = select_ops(Need(DEVICE, KIND), only="reference")
    wanted = TritonAttentionBackend(ops).run(q, pages, batch, 0.3, None, None, CAP)
    backend = TritonAttentionBackend(ops)
    backend._attend = PagedAttention(DEVICE, ON_GPU)
    assert apart(backend.run(q, pages, batch, 0.3, None, None, CAP), wanted) < BOUND
    assert apart(backend.run(q, pages, batch, 0.3, None, None), wanted) > 0.1
