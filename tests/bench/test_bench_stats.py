"""The numbers of a serving benchmark, on results written by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from tokenspeed.bench.http_client import RequestResult
from tokenspeed.bench.stats import distribution, is_good, peak_concurrency, peak_output_rate, summarize


def result(started_s: float, token_times: list[float], output_len: int | None = None, **fields) -> RequestResult:
    ended_s = fields.pop("ended_s", token_times[-1] if token_times else started_s)
    length = len(token_times) if output_len is None else output_len
    return RequestResult(started_s, 10, length, token_times=token_times, ended_s=ended_s, **fields)


def test_latencies_of_one_request():
    one = result(1.0, [1.5, 1.6, 1.8, 2.0], output_len=6)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.latency_s == pytest.approx(1.0)
    assert one.tpot_s == pytest.approx((1.0 - 0.5) / 5)  # by tokens, not by chunks
    assert one.itl_s == pytest.approx([0.1, 0.2, 0.2])


def test_a_single_token_has_no_tpot():
    one = result(0.0, [0.3])
    assert (one.tpot_s, one.itl_s) == (None, [])
    summary = summarize([one], 1.0, (99.0,), {})
    assert summary.distributions["tpot"].mean == 0.0
    assert summary.distributions["ttft"].mean == pytest.approx(300)


def test_an_answer_without_visible_tokens_says_nothing_of_them():
    """Such a server (no tokenizer) once got a TPOT of 0.00 ms, because the only chunk was the last one."""
    one = result(0.0, [], output_len=8, ended_s=2.0)
    assert (one.ttft_s, one.tpot_s) == (None, None)
    summary = summarize([one, result(0.0, [0.1, 0.2])], 2.0, (50.0,), {"tpot": 1e6})
    assert (summary.completed, summary.hidden) == (2, 1)
    assert summary.distributions["ttft"].mean == pytest.approx(100)
    assert summary.goodput == pytest.approx(0.5)
    assert summary.distributions["e2el"].mean == pytest.approx(1100)


def test_percentiles_are_those_of_numpy():
    values = [0.001 * n for n in (5, 1, 9, 3, 3, 8, 2)]
    ours = distribution(values, (0.0, 37.5, 50.0, 99.0, 100.0))
    for p, value in ours.percentiles.items():
        assert value == pytest.approx(float(np.percentile(values, p)) * 1e3)
    assert ours.median == pytest.approx(3.0)
    assert ours.std == pytest.approx(float(np.std(values)) * 1e3)


def test_rates_and_failures():
    results = [result(0.0, [0.1, 0.2]), result(0.0, [0.4], cached_len=4), RequestResult(0.0, error="boom")]
    summary = summarize(results, 2.0, (99.0,), {})
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"boom": 1})
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (20, 3, 4)
    assert summary.request_rate == pytest.approx(1.0)
    assert summary.output_rate == pytest.approx(1.5)
    assert summary.total_rate == pytest.approx(11.5)
    assert summary.goodput is None


def test_nothing_completed_is_all_zero():
    summary = summarize([RequestResult(0.0, error="x")], 0.0, (99.0,), {"ttft": 1})
    assert (summary.completed, summary.peak_concurrency, summary.peak_output_rate, summary.goodput) == (0, 0, 0, 0)
    assert all(values.mean == 0 for values in summary.distributions.values())


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 100.0}, True),
        ({"ttft": 99.0}, False),
        ({"tpot": 50.0}, True),
        ({"tpot": 49.0}, False),
        ({"e2el": 200.0, "ttft": 100.0}, True),
        ({"e2el": 199.0, "ttft": 100.0}, False),
    ],
)
def test_goodput_needs_every_limit_kept(limits, good):
    one = result(0.0, [0.09999, 0.14, 0.19999])  # ttft 100, tpot 50, e2el 200 ms, a hair below
    assert is_good(one, limits) is good
    assert summarize([one], 2.0, (), limits).goodput == pytest.approx(0.5 * good)


def test_peaks():
    results = [result(0.0, [0.2, 0.9, 1.1]), result(0.5, [0.8, 1.2], output_len=4), result(1.1, [1.4, 1.95])]
    # From 0.4 on: two tokens of the first, the four of the second, one of the third. By whole seconds it was 5.
    assert peak_output_rate(results) == pytest.approx(7.0)
    assert peak_concurrency(results) == 2
    touching = [result(0.0, [1.0]), result(1.0, [2.0])]
    assert peak_concurrency(touching) == 1


@pytest.mark.parametrize(
    ("times", "peak"),
    [([0.1, 1.5], 2 / 1.5), ([0.1, 0.2, 0.25], 12.0), ([0.5, 0.9, 1.1, 1.4, 2.9], 4.0)],
    ids=["two in a second and a half", "shorter than a second", "best second over a boundary"],
)
def test_the_peak_is_never_below_the_mean(times: list[float], peak: float) -> None:
    """The bug: counted by whole seconds, the peak was 48.0 tokens/s where the mean was 57.7."""
    results = [result(0.0, times)]
    assert peak_output_rate(results) == pytest.approx(peak)
    assert peak_output_rate(results) >= summarize(results, times[-1], (), {}).output_rate
