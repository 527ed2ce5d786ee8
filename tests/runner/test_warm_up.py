"""Warm-up steps: valid plans that a runner executes, and one of every kind that serving can ask for."""

from __future__ import annotations

import pytest

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import EngineConfig
from tokenspeed.models.registry import examples
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.warm_up import plan_pages, representatives, warm_up_plans

PAGE = 64


def variant(size: int) -> tuple[int, bool, bool]:
    """What a kernel may be compiled anew for: the power of two above, and Triton's own two questions."""
    return (size - 1).bit_length(), size == 1, size % 16 == 0


def test_representatives_stand_for_all():
    sizes = range(1, 513)
    chosen = representatives(sizes)
    assert {variant(size) for size in chosen} == {variant(size) for size in sizes}
    assert len(chosen) < 25
    assert representatives((8, 1, 24, 16, 12)) == (1, 8, 12, 16, 24)
    assert representatives(()) == ()


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "budget"), [(160, 40960, 8192), (1, 2048, 512), (8, 70, 16), (3, 64, 1)]
)
def test_plans_are_valid(max_num_seqs, max_model_len, budget):
    plans = warm_up_plans(max_num_seqs, max_model_len, budget, PAGE)
    assert plans
    assert [plan.step_id for plan in plans] == list(range(len(plans)))
    for plan in plans:
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= budget
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= max_num_seqs
        for row, admission in zip(plan.rows, plan.admissions, strict=True):
            end = row.start + row.num_tokens
            assert row.slot == admission.slot < max_num_seqs
            assert row.start >= 0 and end == len(admission.token_ids) <= max_model_len
            assert len(admission.pages[0]) * PAGE >= end
            assert not row.is_decode
    assert plan_pages(plans) == max(len(a.pages[0]) for plan in plans for a in plan.admissions)


def test_every_kind_of_row_count_and_token_count():
    plans = warm_up_plans(160, 40960, 8192, PAGE)
    single = {variant(len(plan.rows)) for plan in plans if plan.rows[0].num_tokens == 1}
    assert single == {variant(rows) for rows in range(1, 161)}
    tokens = {variant(tokens) for tokens in range(2, 65)}
    assert tokens <= {variant(plan.num_tokens) for plan in plans if plan.rows[0].num_tokens > 1} | single


def test_a_runner_executes_them():
    """Their context is whatever the memory held, NaN perhaps: a row has one token, or none."""
    config = EngineConfig(
        model=examples()[0],
        checkpoint=Checkpoint(name="x", format="config", config_path="/x", weight_files=(), tokenizer_path="/x"),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=60,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        page_size=4,
        num_pages=20,
        kv_memory_bytes=None,
        enable_prefix_caching=True,
        enable_overlap=True,
        enforce_eager=True,
        schedule_policy="fifo",
        attention_backend="auto",
        num_threads=1,
        seed=0,
        max_queue_len=5,
    )
    plans = warm_up_plans(3, 60, 16, 4)
    assert plan_pages(plans) <= 20
    runner = build_runner(config)
    try:
        for plan in plans:
            result = runner.execute(plan).result(60)
            assert [row.slot for row in result.rows] == [row.slot for row in plan.rows]
    finally:
        runner.close()
