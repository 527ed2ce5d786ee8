"""Gaps between replays, from a trace written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.bench.replay_gaps import replay_gaps


def launch(correlation: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 5, "args": {"correlation": correlation}}


def gpu(begin: float, end: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": "k", "ts": begin, "dur": end - begin, "args": {"correlation": correlation}}


def host(number: int, us: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"step {number}", "ts": 0, "dur": us, "args": {}}


EVENTS = [
    *(launch(number) for number in (1, 2, 3, 4)),
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1, "args": {"correlation": 9}},
    gpu(-500, -100, 1),
    *(gpu(0, 40, 2), gpu(45, 90, 2)),
    gpu(92, 96, 7, "gpu_memcpy"),
    gpu(100, 190, 3),
    gpu(191, 195, 9),
    gpu(200, 290, 4),
    *(host(1, 10), host(2, 30), host(3, 20)),
    {"name": "step without duration"},
]


def test_gaps_are_those_between_the_kernels_of_replays() -> None:
    found = replay_gaps(EVENTS, skip_first=1, num_steps=2)
    assert (found.num_steps, found.step_us, found.launch_us) == (2, 100, 20)
    assert found.gap_share == pytest.approx(20 / 200)
    assert found.worst_gap_share == pytest.approx(0.1)
    assert found.idle_share == pytest.approx((5 + 2 + 4 + 1 + 5) / 200)


def test_a_trace_with_too_few_replays() -> None:
    with pytest.raises(ValueError, match=r"holds 4 replays with kernels \(4 launches\), not the 12"):
        replay_gaps(EVENTS, skip_first=1, num_steps=10)


def test_overlapping_replays_have_no_gap() -> None:
    events = [launch(1), launch(2), gpu(0, 110, 1), gpu(100, 200, 2)]
    found = replay_gaps(events, skip_first=0, num_steps=1)
    assert (found.gap_share, found.idle_share) == (0, 0)
