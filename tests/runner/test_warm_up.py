"""Warm-up steps: valid plans that a runner executes, and one of every kind that serving can ask for."""

from __future__ import annotations

from importlib import resources

import pytest
from runner_support import tiny_model

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import EngineConfig
from tokenspeed.kernels.triton.moe_plans import ExpertPlan, ExpertShape, choose, heuristic_plans, read_table
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.warm_up import EXPERT_TOKENS, plan_pages, representatives, warm_up_plans

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


@pytest.mark.parametrize("model", [tiny_model("LlamaForCausalLM"), tiny_model("GptOssForCausalLM")])
def test_a_runner_executes_them(model):
    """Their context is whatever the memory held, NaN perhaps: a row has one token, or none."""
    config = EngineConfig(
        model=model,
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
    runner = build_runner(config)
    plans = warm_up_plans(3, 60, 16, 4, len(runner.groups), model.moe is not None)
    assert plan_pages(plans) <= 20
    try:
        for plan in plans:
            result = runner.execute(plan).result(60)
            assert [row.slot for row in result.rows] == [row.slot for row in plan.rows]
    finally:
        runner.close()


@pytest.mark.parametrize("max_model_len", [300, 40960])
def test_experts_see_steps_of_more_sizes(max_model_len):
    plans = warm_up_plans(64, max_model_len, 4096, PAGE, num_groups=2, has_experts=True)
    usual = warm_up_plans(64, max_model_len, 4096, PAGE, num_groups=2)
    assert [len(plan.rows) for plan in plans[: len(usual)]] == [len(plan.rows) for plan in usual]
    totals = [plan.num_tokens for plan in plans[len(usual) :]]
    expected = [total for total in EXPERT_TOKENS if total <= 4096]
    assert all(total - 16 < found <= total for total, found in zip(expected, totals, strict=True))
    for plan in plans:
        assert all(len(admission.pages) == 2 and admission.pages[0] for admission in plan.admissions)
        assert all(row.start + row.num_tokens <= max_model_len for row in plan.rows)


def shipped_plans() -> list[tuple[ExpertPlan, ...]]:
    folder = resources.files("tokenspeed.kernels.triton").joinpath("tables")
    files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
    return [entry.plans for file in files for entry in read_table(file.read_bytes()).experts]


def test_every_plan_of_the_expert_kernels_is_met():
    """Or it would be compiled while a request waits."""
    shapes = [
        ExpertShape("mxfp4", 32, 4, 2880, 2880),
        ExpertShape("mxfp4", 128, 4, 2880, 2880),
        ExpertShape("dense", 128, 8, 2048, 768),
        ExpertShape("fp8_block", 128, 8, 2048, 768),
    ]
    counts = {plan.num_tokens for plan in warm_up_plans(256, 8192, 8192, PAGE, has_experts=True)}
    chosen = [heuristic_plans(shape, shape.format != "fp8_block", 227 * 1024, False) for shape in shapes]
    chosen += [heuristic_plans(shape, False, 227 * 1024, False, True, True) for shape in shapes[:2]]
    for plans in chosen + shipped_plans():
        assert {choose(plans, count) for count in counts} == set(plans)
