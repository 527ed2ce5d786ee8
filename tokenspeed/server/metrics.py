"""Prometheus metrics of one server: names of the public contract, buckets that see below 100 ms.

Owns the registry. Request-side values are counted here as events pass; engine-side values are read from the client's
newest `EngineStats` when scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.engine.interface import EngineClient, GenerationEvent
from tokenspeed.protocol.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# fmt: off
_FIRST_TOKEN_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80,
    120, 160,
)
_TOKEN_GAP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 1, 2,
)
_LATENCY_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1, 1.5, 2, 3, 5, 8, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920,
)
# fmt: on
_STEP_TOKENS_BUCKETS = (0, *(2**power for power in range(14)))


class Metrics:
    """All metrics of one server, in a registry of its own so that two servers in a process do not meet."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._client = client
        self._last_stats: EngineStats | None = None

        def counter(name: str, help_text: str) -> Counter:
            family = Counter(f"tokenspeed:{name}", help_text, ["model_name"], registry=self.registry)
            return family.labels(model_name)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"tokenspeed:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model_name)

        self.num_requests = counter("num_requests", "Requests handed to the engine, one a prompt.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave a first event.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated, in all sequences.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.num_requests_aborted = counter("num_requests_aborted", "Requests ended by a disconnect or an abort.")
        self.num_requests_failed = counter("num_requests_failed", "Requests the engine took and could not finish.")
        self.num_requests_refused = counter("num_requests_refused", "Requests refused before a first event.")
        self._success = Counter(
            "tokenspeed:request_success",
            "Requests that ended well, by the finish reason of their last sequence.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.success = {reason: self._success.labels(model_name, reason) for reason in ("stop", "length")}
        self.first_token_s = histogram("time_to_first_token_seconds", "Submit to first token.", _FIRST_TOKEN_BUCKETS_S)
        self.token_gap_s = histogram(
            "inter_token_latency_seconds", "Between two events of one sequence.", _TOKEN_GAP_BUCKETS_S
        )
        self.per_output_token_s = histogram(
            "request_time_per_output_token_seconds", "(last - first token) / (tokens - 1).", _TOKEN_GAP_BUCKETS_S
        )
        self.latency_s = histogram("e2e_request_latency_seconds", "Submit to end.", _LATENCY_BUCKETS_S)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of one forward.", _STEP_TOKENS_BUCKETS)
        self.registry.register(_EngineCollector(client, model_name))

    def poll_engine(self) -> None:
        """Take the steps of a new stats snapshot into the histogram; cheap when there is none."""
        stats = self._client.stats
        if stats is self._last_stats or stats is None:
            return
        self._last_stats = stats
        for num_tokens in stats.step_tokens:
            self.step_tokens.observe(num_tokens)

    def exposition(self) -> bytes:
        """The text of `/metrics`."""
        self.poll_engine()
        return generate_latest(self.registry)


class RequestMeter:
    """Counts one engine request from submit to its one end. `close` may come at any moment and counts once."""

    def __init__(self, metrics: Metrics, num_sequences: int) -> None:
        self._metrics = metrics
        self._num_running = num_sequences
        self._start_s = time.perf_counter()
        self._last_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._is_closed = False
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.first_token_s: float | None = None
        metrics.num_requests.inc()

    def note(self, event: GenerationEvent) -> None:
        """Count one event."""
        metrics = self._metrics
        now = time.perf_counter()
        index = event.index
        if self.num_prompt_tokens == 0 and event.num_prompt_tokens:
            self.num_prompt_tokens = event.num_prompt_tokens
            self.num_cached_tokens = event.num_cached_tokens
            metrics.prompt_tokens.inc(event.num_prompt_tokens)
            metrics.prefix_cache_hits.inc(event.num_cached_tokens)
        if event.token_ids:
            self.num_output_tokens += len(event.token_ids)
            metrics.generation_tokens.inc(len(event.token_ids))
            last = self._last_s.get(index)
            if last is not None:
                metrics.token_gap_s.observe(now - last)
            else:
                self._first_s[index] = now
                if self.first_token_s is None:
                    self.first_token_s = now - self._start_s
                    metrics.first_token_s.observe(self.first_token_s)
            self._last_s[index] = now
        if event.finish_reason is not None:
            self._num_running -= 1
            if event.num_output_tokens > 1 and index in self._first_s:
                spent = now - self._first_s[index]
                metrics.per_output_token_s.observe(spent / (event.num_output_tokens - 1))
            if self._num_running == 0 or event.finish_reason in ("abort", "error"):
                self.close(event.finish_reason)
        metrics.poll_engine()

    def close(self, outcome: str) -> None:
        """End the request: stop, length, abort, error or refused. Only the first call counts."""
        if self._is_closed:
            return
        self._is_closed = True
        metrics = self._metrics
        if outcome in metrics.success:
            metrics.success[outcome].inc()
            metrics.latency_s.observe(self.elapsed_s)
        elif outcome == "abort":
            metrics.num_requests_aborted.inc()
        elif outcome == "error":
            metrics.num_requests_failed.inc()
        else:
            metrics.num_requests_refused.inc()

    @property
    def elapsed_s(self) -> float:
        """Seconds since submit."""
        return time.perf_counter() - self._start_s


class _EngineCollector(Collector):
    """Reads the engine's newest snapshot when scraped. Before the first snapshot it gives nothing."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        if stats is None:
            return
        pages = max(1, stats.num_pages_total)
        yield self._gauge("num_requests_running", "Sequences being computed.", stats.num_running)
        waiting = stats.num_waiting + stats.num_compiling
        yield self._gauge("num_requests_waiting", "Requests in the queue, or waiting for their grammar.", waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of pages held by requests, 0 to 1.", stats.num_pages_used / pages
        )
        yield self._gauge("kv_cache_pages_total", "Pages of the KV pool.", stats.num_pages_total)
        yield self._gauge("kv_cache_pages_cached", "Pages only in the prefix index.", stats.num_pages_cached)
        yield self._gauge("num_grammars", "Compiled grammars in memory, kept or in use.", stats.num_grammars)
        yield self._gauge("grammar_memory_bytes", "What compiled grammars take, roughly.", stats.grammar_bytes)
        yield self._counter("num_preemptions", "Sequences preempted to free pages.", stats.num_preemptions)
        yield self._counter("num_nan_aborted_requests", "Requests ended by NaN logits.", stats.num_nan_aborted)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tokenspeed:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tokenspeed:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
