"""What kernels ask of a GPU: whether Triton serves it, whether launches may overlap, and scratch for split sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.kernels.registry import Need


def why_no_triton(need: Need) -> str | None:
    """None where our kernels run, otherwise the reason."""
    if need.device.type != "cuda":
        return f"Triton kernels run on a GPU, the device is {need.device.type}"
    if torch.cuda.get_device_capability(need.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of programs that share an output, for every call on one stream: float32 partials, and int32 counters that
    are zero between calls."""

    partials: torch.Tensor
    counters: torch.Tensor


def new_workspace(device: torch.device, num_partials: int, num_counters: int) -> Workspace:
    return Workspace(
        torch.empty(num_partials, dtype=torch.float32, device=device),
        torch.zeros(num_counters, dtype=torch.int32, device=device),
    )
