"""What chosen implementations say in the log of a start."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels import registry
from tokenspeed.kernels.registry import OPTIONAL, REQUIRED, SLOT_OPS, Implementation, Need, select_ops
from tokenspeed.kernels.triton import launch, registered

CPU = Need(torch.device("cpu"), torch.float32)
GPU = Need(torch.device("cuda"), torch.bfloat16)


def one(op: str, rank: int, reason: str | None, *notes: str) -> Implementation:
    return Implementation(op, f"rank {rank}", rank, lambda need: reason, lambda need: op, notes=lambda need: notes)


def test_notes_of_the_chosen_come_once_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    losing = one("embedding", 1, "too small", "not this")
    made = [losing, *(one(op, 2, None, "slow here", f"{op} too") for op in REQUIRED)]
    monkeypatch.setattr(registry, "discover", lambda: made)
    _, report = select_ops(CPU)
    choices = [*(f"{op}: rank 2" for op in REQUIRED), *(f"{op}: none" for op in OPTIONAL)]
    choices[0] += " (not rank 1: too small)"
    assert report == [*choices, "slow here", *(f"{op} too" for op in REQUIRED)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (registered.TILES_GPU, []),
        ("NVIDIA L4", ["tiles of attention and linears: measured on NVIDIA H200, this is NVIDIA L4"]),
    ],
)
def test_another_gpu_than_the_tiles_is_named(name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(registered, "launch_notes", list)
    entries = {entry.op: entry for entry in registered.IMPLEMENTATIONS}
    assert all(entries[op].notes(GPU) == expected for op in ("linear", "fused_linear", "paged_attention"))
    assert not any(entries[op].notes(GPU) for op in SLOT_OPS)


def test_launches_that_are_not_quick_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: registered.TILES_GPU)
    monkeypatch.setattr(launch, "COMPARED", ("0.0.1",))
    (entry,) = [entry for entry in registered.IMPLEMENTATIONS if entry.op == "rms_norm"]
    (line,) = entry.notes(GPU)
    assert line.startswith("launches: by Triton (quick launches know 0.0.1, this is ")
