"""/metrics: names of the public contract, and counts that stay right whatever way a request ends."""

from __future__ import annotations

import httpx
from app_client import chat, http_client
from fake_engine_client import FakeClient
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.protocol.errors import Overloaded
from tokenspeed.protocol.messages import EngineStats

URL = "/v1/chat/completions"


async def read(http: httpx.AsyncClient) -> dict[str, float]:
    """Sample name (with the finish reason where it has one) to value."""
    text = (await http.get("/metrics")).text
    result = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            if "le" in sample.labels:
                continue
            reason = sample.labels.get("finished_reason")
            result[sample.name.removeprefix("tokenspeed:") + (f"/{reason}" if reason else "")] = sample.value
    return result


async def test_counts_of_good_requests(http: httpx.AsyncClient):
    await http.post(URL, json=chat(n=2))
    await http.post(URL, json=chat(stream=True, max_tokens=3))
    await http.post("/v1/completions", json={"prompt": [[1, 2], [3]], "max_tokens": 3})
    values = await read(http)
    assert values["num_requests_total"] == 4
    assert values["request_success_total/stop"] == 1 and values["request_success_total/length"] == 3
    assert values["prompt_tokens_total"] == 10 + 10 + 2 + 1
    assert values["generation_tokens_total"] == 12 + 3 + 6
    assert values["prefix_cache_hits_total"] == 8
    assert values["time_to_first_token_seconds_count"] == 4
    assert values["e2e_request_latency_seconds_count"] == 4
    assert values["inter_token_latency_seconds_count"] == 2 * 5 + 3 * 2
    assert values["request_time_per_output_token_seconds_count"] == 5


async def test_counts_of_bad_requests(http: httpx.AsyncClient, engine: FakeClient):
    await http.post(URL, json=chat(temperature=9))  # refused at the edge: the engine never sees it
    engine.refuse = Overloaded("full", 1)
    await http.post(URL, json=chat())
    engine.refuse, engine.fail_after = None, 2
    await http.post(URL, json=chat(stream=True, n=2))
    engine.fail_after, engine.boom_after = None, 0
    await http.post(URL, json=chat())
    values = await read(http)
    assert values["num_requests_total"] == 3
    assert values["num_requests_refused_total"] == 1 and values["num_requests_failed_total"] == 2
    assert values["request_success_total/stop"] == 0 and values["num_requests_aborted_total"] == 0
    assert values["e2e_request_latency_seconds_count"] == 0


async def test_engine_values(http: httpx.AsyncClient, engine: FakeClient):
    assert "num_requests_running" not in await read(http)

    def stats(step_tokens: list[int]) -> EngineStats:
        return EngineStats(
            num_running=3,
            num_waiting=2,
            num_pages_total=8,
            num_pages_used=2,
            num_pages_cached=1,
            num_preemptions=5,
            num_prefix_hit_tokens=0,
            num_prompt_tokens=0,
            num_generated_tokens=0,
            step_tokens=step_tokens,
            num_nan_aborted=4,
            num_compiling=7,
            num_grammars=6,
            grammar_bytes=5000,
        )

    engine.stats = stats([8, 1, 1])
    for _ in range(2):  # a snapshot counts once, however often it is looked at
        values = await read(http)
        assert (values["num_requests_running"], values["num_requests_waiting"]) == (3, 9)
        assert values["kv_cache_usage_perc"] == 0.25
        assert (values["num_grammars"], values["grammar_memory_bytes"]) == (6, 5000)
        assert (values["num_preemptions_total"], values["num_nan_aborted_requests_total"]) == (5, 4)
        assert (values["iteration_tokens_total_count"], values["iteration_tokens_total_sum"]) == (3, 10)
    engine.stats = stats([2])
    await http.post(URL, json=chat())
    assert (await read(http))["iteration_tokens_total_count"] == 4


async def test_metrics_can_be_off(engine: FakeClient):
    async with http_client(engine, enable_metrics=False) as http:
        assert (await http.get("/metrics")).status_code == 404
        assert (await http.post(URL, json=chat())).status_code == 200
