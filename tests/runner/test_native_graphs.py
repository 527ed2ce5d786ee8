"""A runner as `build_runner` makes it, on tiny random models: recorded native steps equal eager ones to the bit."""

from __future__ import annotations

import re
from itertools import count

import msgspec
import pytest
import torch
from runner_support import Plans, engine_config

from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.registry import examples
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.model_runner import ModelRunner

EXAMPLES = {example.architecture: example for example in examples()}
WINDOWS = {"Llama with windows": msgspec.structs.replace(EXAMPLES["LlamaForCausalLM"], layer_windows=(8, None))}


def bits(row: RowResult) -> tuple[object, ...]:
    return (row.slot, row.token_ids, [(one.logprob, one.top_ids, one.top_logprobs) for one in row.logprobs])


def drive(runner: ModelRunner) -> list[list[tuple[object, ...]]]:
    """Prompts of several lengths join decodes until there are more than the graphs serve; then some only decode."""
    runner.capture()
    num_groups = len(runner.groups)
    plans, numbers, seen = Plans(300 * num_groups, -1, num_groups), count(), []
    running: list[int] = []
    for joining in (1, 2, 0, 5, 24, 3, 1, 0):
        slots = [next(numbers) for _ in range(joining)]
        sampling = [SamplingParams(temperature=slot % 3 / 2, seed=slot, logprobs=2) for slot in slots]
        lens = [1 + slot * 7 % 11 for slot in slots]
        admissions = [
            plans.admit(slot, [(slot + i) % 128 for i in range(length)], params)
            for slot, length, params in zip(slots, lens, sampling, strict=True)
        ]
        rows = [plans.decode(slot) for slot in running] + [plans.row(s, n) for s, n in zip(slots, lens, strict=True)]
        seen.append([bits(row) for row in runner.execute(plans.step(admissions, rows)).result(60).rows])
        running += slots
    for keep in (running[::2], running[5:7], running[-1:]):
        rows = [plans.decode(slot) for slot in keep]
        seen.append([bits(row) for row in runner.execute(plans.step([], rows)).result(60).rows])
    runner.close()
    return seen


@pytest.mark.parametrize("model", (EXAMPLES | WINDOWS).values(), ids=(EXAMPLES | WINDOWS).keys())
def test_recorded_steps_equal_eager_ones_to_the_bit(model: ModelConfig) -> None:
    ops, report = select_ops(Need(torch.device("cpu"), torch.bfloat16))
    if ops.recorder is None:
        pytest.skip(report[-1])
    recorded = build_runner(engine_config(model))
    eager = build_runner(engine_config(model, enforce_eager=True))
    assert drive(recorded) == drive(eager)
    # Experts have no native kernels yet, so their steps cannot be recorded.
    expected = "0 sizes, then eager" if model.moe is not None else r"(recorded for 1 to|[1-9]\d* sizes)"
    assert re.match(f"step graphs: {expected}", recorded.report[-1]), recorded.report[-1]
    assert "every step runs eagerly" in eager.report[-1]


def test_the_report_says_what_was_chosen_and_why() -> None:
    runner = build_runner(engine_config(EXAMPLES["LlamaForCausalLM"], dtype="float32", kv_cache_dtype="float32"))
    runner.close()
    text = "\n".join(runner.report)
    for part in ("paged_attention: ", "weights: ", "(the checkpoint is not quantized; weights are kept in float32)"):
        assert part in text


def test_tables_reach_as_far_as_the_context_that_is_served() -> None:
    """A context longer than the model's (allowed by an environment variable): rotary rows exist for its positions
    (regression: the table ended at the model's context)."""
    model = msgspec.structs.replace(EXAMPLES["Qwen3ForCausalLM"], max_position=16)
    runner = build_runner(engine_config(model, max_model_len=40, dtype="float32", kv_cache_dtype="float32"))
    plans = Plans(num_pages=300)
    greedy = SamplingParams(temperature=0.0, seed=0, logprobs=0)
    plan = plans.step([plans.admit(0, list(range(30)), greedy)], [plans.row(0, 30)])
    (row,) = runner.execute(plan).result(60).rows
    runner.close()
    assert row.error is None and len(row.token_ids) == 1


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 40 tokens"):
        build_runner(engine_config(EXAMPLES["LlamaForCausalLM"], num_pages=10))
