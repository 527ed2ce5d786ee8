"""The largest steps: no step that the scheduler can plan has more tokens or more rows of logits, and they run."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from runner_support import engine_config, sum_runner, tiny_model

from tokenspeed.protocol.sampling import MAX_LOGPROBS
from tokenspeed.runner.prompt_logprobs import ROWS
from tokenspeed.runner.trial_steps import (
    NUM_PAGES,
    decode_step,
    long_lengths,
    long_prompts_step,
    many_lengths,
    many_prompts_step,
    recorded_step,
)
from tokenspeed.sampling.penalties import has_penalties

CONFIG = engine_config(tiny_model("LlamaForCausalLM"), device="cuda", capture_sizes=(1, 2, 4))
EVERY_STEP = (recorded_step, decode_step, long_prompts_step, many_prompts_step)


def sized(**changes):
    return msgspec.structs.replace(CONFIG, **changes)


@given(budget=some.integers(1, 500), max_num_seqs=some.integers(1, 60), longest=some.integers(1, 300))
def test_no_prompts_are_more(budget, max_num_seqs, longest):
    lengths = many_lengths(budget, max_num_seqs, longest)
    assert len(lengths) == min(budget, max_num_seqs), "logits of as many rows as can be"
    assert sum(lengths) == min(budget, max_num_seqs * longest), "and as many tokens"
    assert all(1 <= length <= longest for length in lengths)
    assert lengths == sorted(lengths, reverse=True)


@given(budget=some.integers(1, 9000), max_num_seqs=some.integers(1, 60), longest=some.integers(1, 9000))
def test_no_prompts_are_longer(budget, max_num_seqs, longest):
    lengths = long_lengths(budget, max_num_seqs, longest)
    assert len(set(lengths)) == 1, "neighbours of one length take one call of a library's attention"
    assert lengths[0] <= longest and len(lengths) <= max_num_seqs
    full = min(budget, max_num_seqs * longest)
    assert full - len(lengths) < sum(lengths) <= full


def test_the_prompt_step_samples_every_row():
    """Regression: it had as many rows as prompts of full length fill the budget, 1 as a rule, not max_num_seqs."""
    plan = many_prompts_step(sized(max_num_seqs=160, max_num_batched_tokens=8192, max_model_len=40960, page_size=64), 2)
    assert plan.num_tokens == 8192 and len(plan.rows) == 160 == sum(row.samples for row in plan.rows)
    assert plan.rows[0].num_tokens == 8192 - 159
    assert plan.admissions[0].sampling.prompt_logprobs is not None
    assert plan.admissions[0].prompt_len == ROWS + 1, "one whole piece of prompt log-probabilities"
    assert all(len(admission.pages) == 2 for admission in plan.admissions)


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "sizes", "count"),
    [(160, 8192, (1, 64), 160), (160, 32, (1, 64), 64), (160, 128, (), 128), (1, 1, (), 1), (8, 2, (4,), 4)],
)
def test_the_decode_step_has_the_rows_of_the_largest(max_num_seqs, budget, sizes, count):
    plan = decode_step(sized(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, capture_sizes=sizes), 1)
    assert plan.num_tokens == len(plan.rows) == count
    assert all(row.start == 1 for row in plan.rows)


def test_rows_ask_for_everything_but_those_of_a_graph():
    for plan in (many_prompts_step(CONFIG, 1), long_prompts_step(CONFIG, 1), decode_step(CONFIG, 1)):
        for admission in plan.admissions:
            wanted = admission.sampling
            assert wanted.logprobs == MAX_LOGPROBS and wanted.top_p < 1 and wanted.top_k > 1 and wanted.min_p > 0
            assert wanted.presence_penalty and wanted.frequency_penalty and wanted.repetition_penalty != 1
            assert wanted.logit_bias and wanted.min_tokens and admission.banned_token_ids
    recorded = recorded_step(CONFIG, 1)
    assert len(recorded.rows) == 4
    for admission in recorded.admissions:
        wanted = admission.sampling
        assert wanted.logprobs is None and not wanted.logit_bias and not admission.banned_token_ids
        assert not has_penalties(wanted)


def test_pages_are_those_of_a_pool_of_one():
    for plan in [step(CONFIG, 1) for step in EVERY_STEP]:
        for row, admission in zip(plan.rows, plan.admissions, strict=True):
            (pages,) = admission.pages
            assert set(pages) == set(range(NUM_PAGES))
            assert len(pages) * CONFIG.page_size >= row.start + row.num_tokens == len(admission.token_ids)


def test_they_run():
    config = sized(max_num_seqs=5, max_num_batched_tokens=23, max_model_len=21, page_size=4, capture_sizes=(1, 3))
    for step, count in zip(EVERY_STEP, (3, 5, 2, 5), strict=True):
        runner, _ = sum_runner(num_pages=NUM_PAGES, max_num_seqs=5, max_model_len=21)
        try:
            rows = runner.execute(step(config, 1)).result().rows
        finally:
            runner.close()
        assert len(rows) == count
        if step is recorded_step:
            continue
        assert all(row.error is None and len(row.logprobs[0].top_ids) == MAX_LOGPROBS for row in rows)
    assert len(rows[0].prompt_logprobs) == 23 - 4 - 1, "of the first prompt, which four others leave 19 tokens"
