"""What a Chrome trace says of recorded steps: how long the GPU idles between one replay and the next.

replay i    |== kernels ==|            |== kernels ==|    replay i + 1
            begin         end          begin
                          |--- gap ----|               idle = gap less copies that run in it
            |--------- step -----------|
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GRAPH_LAUNCH = "cudaGraphLaunch"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class ReplayGaps:
    """Of consecutive replays; times in microseconds, shares of the steps' time.

    Fields:
        num_steps: pairs of replays.
        step_us: median from the beginning of one to that of the next.
        gap_share, worst_gap_share: time between replays over that of the steps, all together and the worst step's.
        idle_share: time in which the GPU does nothing at all, copies between replays and holes inside them included.
        launch_us: median of the host's ranges named `step N`, under the profiler.
    """

    num_steps: int
    step_us: float
    gap_share: float
    worst_gap_share: float
    idle_share: float
    launch_us: float


def replay_gaps(events: Sequence[dict[str, Any]], skip_first: int, num_steps: int) -> ReplayGaps:
    """Read a trace's `traceEvents`.

    Args:
        skip_first: replays to pass over: starting the profiler lets the pipeline run empty.
        num_steps: pairs of replays to look at after that.
    Raises:
        ValueError: the trace holds fewer replays.
    """
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("name") == GRAPH_LAUNCH and "correlation" in event.get("args", {})
    }
    spans: dict[int, tuple[float, float]] = {}
    work: list[tuple[float, float]] = []
    for event in events:
        if event.get("cat") not in GPU_WORK:
            continue
        begin, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))
        work.append((begin, end))
        replay = event.get("args", {}).get("correlation")
        if replay in launches:
            known = spans.get(replay, (begin, end))
            spans[replay] = min(known[0], begin), max(known[1], end)
    replays = sorted(spans.values())[skip_first : skip_first + num_steps + 1]
    if len(replays) < num_steps + 1:
        raise ValueError(
            f"the trace holds {len(spans)} replays with kernels ({len(launches)} launches), not the "
            f"{skip_first + num_steps + 1} that are needed"
        )
    steps = [after[0] - before[0] for before, after in pairwise(replays)]
    gaps = [max(0.0, after[0] - before[1]) for before, after in pairwise(replays)]
    total = replays[-1][0] - replays[0][0]
    hosts = [float(event["dur"]) for event in events if str(event.get("name")).startswith("step ") and "dur" in event]
    return ReplayGaps(
        num_steps=num_steps,
        step_us=statistics.median(steps),
        gap_share=sum(gaps) / total,
        worst_gap_share=max(gap / step for gap, step in zip(gaps, steps, strict=True)),
        idle_share=1.0 - _busy(work, replays[0][0], replays[-1][0]) / total,
        launch_us=statistics.median(hosts) if hosts else 0.0,
    )


def _busy(work: list[tuple[float, float]], first: float, last: float) -> float:
    """Time in [first, last) during which anything runs."""
    busy, reached = 0.0, first
    for begin, end in sorted(work):
        begin, end = max(begin, reached), min(end, last)
        if end > begin:
            busy += end - begin
            reached = end
    return busy
