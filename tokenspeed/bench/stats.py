"""From request results to the numbers of a serving benchmark. Pure: no clock, no I/O.

TPOT = (latency - TTFT) / (output tokens - 1), of requests with more than one output token. Percentiles interpolate
linearly between neighbours. Failed requests count as failed and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenspeed.bench.http_client import RequestResult

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_KEYS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds. `percentiles`: p -> value. All zero when there was nothing to measure."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run. Rates are per second of `duration_s`.

    Fields:
        hidden: completed requests none of whose chunks showed a token: without TTFT, TPOT and ITL, never good.
        goodput: requests a second that keep all limits; None when none were given.
    """

    duration_s: float
    completed: int
    failed: int
    hidden: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    request_rate: float
    goodput: float | None
    output_rate: float
    total_rate: float
    peak_output_rate: float
    peak_concurrency: int
    distributions: dict[str, Distribution]
    errors: dict[str, int]


def summarize(
    results: Sequence[RequestResult], duration_s: float, percentiles: Sequence[float], goodput_ms: dict[str, float]
) -> Summary:
    """Count a run.

    Args:
        duration_s: from the first request until the last answer.
        percentiles: in [0, 100].
        goodput_ms: limits by metric (`ttft`, `tpot`, `e2el`) that a good request keeps all of.
    """
    done = [result for result in results if result.error is None]
    samples = {
        "ttft": [ttft for result in done if (ttft := result.ttft_s) is not None],
        "tpot": [tpot for result in done if (tpot := result.tpot_s) is not None],
        "itl": [gap for result in done for gap in result.itl_s],
        "e2el": [result.latency_s for result in done],
    }
    input_tokens = sum(result.prompt_len for result in done)
    output_tokens = sum(result.output_len for result in done)
    seconds = max(duration_s, 1e-9)
    good = sum(is_good(result, goodput_ms) for result in done)
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        failed=len(results) - len(done),
        hidden=sum(not result.token_times for result in done),
        input_tokens=input_tokens,
        cached_tokens=sum(result.cached_len for result in done),
        output_tokens=output_tokens,
        request_rate=len(done) / seconds,
        goodput=good / seconds if goodput_ms else None,
        output_rate=output_tokens / seconds,
        total_rate=(input_tokens + output_tokens) / seconds,
        peak_output_rate=peak_output_rate(done),
        peak_concurrency=peak_concurrency(done),
        distributions={name: distribution(values, percentiles) for name, values in samples.items()},
        errors=dict(Counter(result.error for result in results if result.error is not None)),
    )


def distribution(seconds: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    """Of values in seconds, in milliseconds."""
    if not seconds:
        return Distribution(0.0, 0.0, 0.0, {p: 0.0 for p in percentiles})
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    at = {p: float(np.percentile(values, p)) for p in percentiles}
    return Distribution(float(values.mean()), float(np.median(values)), float(values.std()), at)


def is_good(result: RequestResult, limits_ms: dict[str, float]) -> bool:
    """A request that keeps every limit. One with a single token has no TPOT and keeps that limit."""
    if result.ttft_s is None:
        return False
    values = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.latency_s}
    return all(values[name] * 1e3 <= limit for name, limit in limits_ms.items())


def peak_output_rate(results: Sequence[RequestResult]) -> float:
    """Output tokens a second in the best stretch: any one second, or all from the first request to the last answer, so
    that it is never below the mean. A chunk carries an equal share of its request's tokens."""
    if not results:
        return 0.0
    chunks: list[tuple[float, float]] = []  # (arrival, tokens)
    for result in results:
        times = result.token_times or [result.ended_s]
        chunks += [(time_s, result.output_len / len(times)) for time_s in times]
    chunks.sort()
    length_s = max(result.ended_s for result in results) - min(result.started_s for result in results)
    span_s = max(length_s, 1e-6)
    window_s = min(1.0, span_s)
    most = held = 0.0
    oldest = 0
    for time_s, tokens in chunks:
        held += tokens
        while chunks[oldest][0] <= time_s - window_s:
            held -= chunks[oldest][1]
            oldest += 1
        most = max(most, held)
    return max(most / window_s, sum(tokens for _, tokens in chunks) / span_s)


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Most requests in flight at one moment. One that ends as another starts does not overlap it."""
    moments = [(result.started_s, 1) for result in results] + [(result.ended_s, -1) for result in results]
    running = peak = 0
    for _, change in sorted(moments):
        running += change
        peak = max(peak, running)
    return peak
