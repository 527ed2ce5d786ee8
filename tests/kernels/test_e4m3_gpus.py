"""Kernels that read or write 8-bit floats are for GPUs that have them; the compiler refuses the others in mid-start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.triton import fp8_linear, registered
from tokenspeed.kernels.triton.gpu import why_no_e4m3
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels
from tokenspeed.moe.interface import Activation, MoeNeed

GPU = torch.device("cuda")
HALF = Need(GPU, torch.bfloat16)
E4M3_POOL = Need(GPU, torch.bfloat16, torch.float8_e4m3fn)
OF_POOL = ("qkv_rope_cache", "paged_attention")
NEED = MoeNeed("cuda", torch.bfloat16, 4, 2, 64, 32, "fp8_block", False, Activation())


def entry(op: str) -> Implementation:
    made = (*registered.IMPLEMENTATIONS, *fp8_linear.IMPLEMENTATIONS)
    (found,) = (implementation for implementation in made if implementation.op == op)
    return found


@pytest.mark.parametrize(
    ("capability", "has_e4m3"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_who_serves_8_bit_floats(capability: tuple[int, int], has_e4m3: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for op in OF_POOL:
        assert entry(op).why_not(HALF) is None
        assert (entry(op).why_not(E4M3_POOL) is None) == has_e4m3
    for reason in (entry("fp8_linear").why_not(HALF), why_no_e4m3(GPU)):
        assert reason == (None if has_e4m3 else "the GPU has no e4m3 (compute capability 8.9)")


def test_old_gpus_stay_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert all("older than compute capability 8.0" in str(entry(op).why_not(HALF)) for op in OF_POOL)


def test_experts_in_e4m3_are_refused_with_a_remedy() -> None:
    """Regression: the first step ended with the compiler's error."""
    without = TritonExpertKernels(DEVICE, False, None, 163 * 1024, "a GPU", None, "the GPU has no e4m3")
    assert without.why_not(NEED) == "the GPU has no e4m3; use a checkpoint with experts in 16 bits"
    assert without.why_not(replace(NEED, format="dense")) is without.why_not(replace(NEED, format="mxfp4")) is None
    assert TritonExpertKernels(DEVICE, False, None, 99 * 1024, "a GPU", None).why_not(NEED) is None


def test_experts_of_odd_sizes_are_refused_with_a_remedy() -> None:
    kernels = TritonExpertKernels(DEVICE, False, None, 99 * 1024, "a GPU", None)
    reason = kernels.why_not(replace(NEED, format="dense", intermediate_size=40))
    assert reason == "the sizes 64 and 40 are not multiples of 16; use --device cpu"
