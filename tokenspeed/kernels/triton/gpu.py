"""What kernels ask of a GPU: whether Triton serves it and launches overlap, which tile fits, scratch for split sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton

from tokenspeed.config.gpu_choices import E4M3_CAPABILITY
from tokenspeed.kernels.registry import Need

NO_LIMIT = 2**31 - 1
ASYNC_SHARED_BYTES = 200 * 1024
"""Where a program may have more (Hopper: 227 KiB) tensor cores read shared memory themselves, while a loop goes on."""

Tile = TypeVar("Tile")


def why_no_triton(need: Need) -> str | None:
    """None where our kernels run, otherwise the reason."""
    if need.device.type != "cuda":
        return f"Triton kernels run on a GPU, the device is {need.device.type}"
    if torch.cuda.get_device_capability(need.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def why_no_e4m3(device: torch.device) -> str | None:
    """None where kernels read and write e4m3, otherwise the reason."""
    if torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY:
        return None
    return f"the GPU has no e4m3 (compute capability {E4M3_CAPABILITY[0]}.{E4M3_CAPABILITY[1]})"


def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have: 227 KiB on Hopper, 163 on an A100, 99 on an L40S, an A10 and an RTX."""
    if device.type != "cuda":
        return NO_LIMIT  # Triton's interpreter has none
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def copies(stages: int, limit: int) -> int:
    """Of its operands that a loop of `stages` keeps in shared memory on a GPU whose programs may have `limit` bytes:
    all but the one at work, which an asynchronous tensor core still reads (compiled by Triton 3.6 for each kind)."""
    return max(1, stages if limit > ASYNC_SHARED_BYTES else stages - 1)


def fitting(tiles: Iterable[Tile], bytes_of: Callable[[Tile], int], limit: int) -> Tile:
    """The first tile that takes at most `limit` bytes of shared memory; where none does the last, whose
    launch `runner.memory_errors` makes readable. `tiles`: one at least."""
    last: Tile | None = None
    for last in tiles:
        if bytes_of(last) <= limit:
            break
    assert last is not None
    return last


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
