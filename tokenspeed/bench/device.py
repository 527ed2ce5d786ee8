"""What the device can do, measured in the same run: bytes and operations a second, the ceilings of every bound.

A figure is the best of several tries: a ceiling is what the machine reaches when nothing disturbs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CUDA_COPY_BYTES = 2**31
CPU_READ_BYTES = 2**29
CUDA_MATMUL_SIZE = 8192
CPU_MATMUL_SIZE = 1536
TRIES = 8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Fields:
    device: name of the device.
    bytes_per_s: on CUDA a device-to-device copy, read and written bytes together; on a CPU a sum over a large array.
    flop_per_s: a square matmul in the model's dtype.
    fp8_flop_per_s: one of e4m3 numbers, where that was asked for.
    """

    device: str
    bytes_per_s: float
    flop_per_s: float
    fp8_flop_per_s: float | None = None


def measure_ceilings(device: torch.device, dtype: torch.dtype, cpu_name: str, *, with_fp8: bool = False) -> Ceilings:
    """Measure them. On a CPU with the number of threads that torch is set to.

    Args:
        with_fp8: fp8_flop_per_s too; the device must multiply e4m3.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name
    fp8 = fp8_matmul_rate(device) if with_fp8 else None
    return Ceilings(name, bandwidth(device), matmul_rate(device, dtype), fp8)


def bandwidth(device: torch.device) -> float:
    """Bytes a second; see `Ceilings`."""
    if device.type == "cuda":
        source = torch.ones(CUDA_COPY_BYTES // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return 2 * CUDA_COPY_BYTES / best_s(lambda: target.copy_(source), device)
    block = torch.ones(CPU_READ_BYTES // 4, dtype=torch.float32)
    return CPU_READ_BYTES / best_s(block.sum, device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square matmul of random numbers (equal ones would draw less power and clock higher)."""
    size = CUDA_MATMUL_SIZE if device.type == "cuda" else CPU_MATMUL_SIZE
    left, right = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_s(lambda: left @ right, device)


def fp8_matmul_rate(device: torch.device) -> float:
    """As `matmul_rate`, of e4m3 numbers with one scale a tensor, result in bfloat16."""
    size = CUDA_MATMUL_SIZE if device.type == "cuda" else CPU_MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * size**3 / best_s(multiply, device)


def best_s(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> float:
    """Seconds of the fastest of several runs, after one that does not count. CUDA: between events on the stream."""
    work()
    if device.type == "cuda":
        return min(_event_s(work, device) for _ in range(tries))
    times: list[float] = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _event_s(work: Callable[[], object], device: torch.device) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        started.record()
        work()
        ended.record()
        torch.cuda.synchronize()
    return float(started.elapsed_time(ended)) / 1e3
