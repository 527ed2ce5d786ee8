"""The runner on a GPU: kernels compile beside the load, the KV pool takes what the largest steps leave."""

from __future__ import annotations

import os
from dataclasses import replace

from tokenspeed.cache.capacity import cache_profile
from tokenspeed.cache.spec import GroupSpec, group_layers
from tokenspeed.config.engine import EngineConfig
from tokenspeed.grammar.build import build_compiler
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.triton.compile_monitor import VARIABLE, CompileMonitor
from tokenspeed.observability.startup import count_compiles, startup_phase
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, StepPlan
from tokenspeed.runner.compile import is_worker, start_compile
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.kv_pool import with_pages
from tokenspeed.runner.loaded import LoadedModel, bind_pool, load
from tokenspeed.runner.memory import size_cuda_pool
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.warm_up import plan_pages, warm_up_plans


def build_cuda_runner(config: EngineConfig) -> CudaModelRunner:
    """Build, load and size; nothing is recorded yet.

    Raises:
        ConfigError: a choice that cannot run here, or no room for one sequence.
        CheckpointError: weights that do not fit the model.
    """
    monitor = CompileMonitor(os.environ.get(VARIABLE, "off"))
    monitor.install()
    count_compiles(monitor.totals)
    grammars, grammar_report = build_compiler(config)
    with start_compile(config) as job:
        with startup_phase("weights.target"):
            loaded = load(config)
        with startup_phase("kernels.compile"):
            compile_report = job.wait()
    with startup_phase("kv.build"):
        groups = _size(config, loaded)
        bind_pool(config, loaded, groups)
    budget = config.max_num_batched_tokens
    has_experts = config.model.moe is not None
    warm_up = warm_up_plans(
        config.max_num_seqs, config.max_model_len, budget, config.page_size, len(groups), has_experts
    )
    graphs = GraphPlan(
        sizes=config.capture_sizes,
        pad=config.pad_graphs,
        prefill_sizes=config.prefill_sizes,
        warm_up=tuple(warm_up),
        ready=_nothing_to_watch if is_worker() else monitor.serving,
    )
    profile = cache_profile(groups, config.max_model_len, budget)
    loaded = replace(loaded, report=[grammar_report, compile_report, *loaded.report, profile.described()])
    with startup_phase("executor.init"):
        return _runner(config, loaded, groups, graphs, grammars)


def _nothing_to_watch() -> None:
    """A worker compiles; it serves nobody."""


def _runner(
    config: EngineConfig,
    loaded: LoadedModel,
    groups: list[GroupSpec],
    graphs: GraphPlan,
    grammars: GrammarCompiler | None = None,
) -> CudaModelRunner:
    limits = Limits(config.max_num_seqs, config.max_model_len, config.model.vocab_size)
    return CudaModelRunner(loaded, groups, limits, graphs, grammars)


def _size(config: EngineConfig, loaded: LoadedModel) -> list[GroupSpec]:
    """Cache groups with the pages that fit beside the largest steps, which run here on a pool of scratch."""
    groups = group_layers(loaded.model.cache_specs(), config.page_size)
    if is_worker():
        assert config.num_pages is not None, "a worker's pool is given"
        return with_pages(groups, config.num_pages * len(groups))
    prefill = _prompt_step(config, len(groups))
    decode = _decode_step(config, len(groups))
    trial = with_pages(groups, plan_pages([prefill, decode]))
    bind_pool(config, loaded, trial)
    runner = _runner(config, loaded, trial, GraphPlan())
    try:
        num_pages = size_cuda_pool(
            lambda: _run(runner, prefill), lambda: _run(runner, decode), groups, config, loaded.ops.device
        )
    finally:
        runner.close()
    return with_pages(groups, num_pages)


def _run(runner: CudaModelRunner, plan: StepPlan) -> None:
    runner.execute(plan).result()


def _prompt_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """The whole token budget as prompts, each as long as fits, in few pages that all share."""
    left = config.max_num_batched_tokens
    lengths: list[int] = []
    while left > 0 and len(lengths) < config.max_num_seqs:
        lengths.append(min(left, config.max_model_len - 1))
        left -= lengths[-1]
    return _step(lengths, [0] * len(lengths), config.page_size, num_groups)


def _decode_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """One token of as many requests as may run."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    return _step([1] * count, [1] * count, config.page_size, num_groups)


def _step(lengths: list[int], starts: list[int], page_size: int, num_groups: int) -> StepPlan:
    pages = list(range(-(-(max(lengths) + max(starts)) // page_size)))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    admissions = [
        Admission(slot, "sizing", slot, [0] * (start + length), start + length, (pages,) * num_groups, sampling)
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    rows = [
        Row(slot, start, length, ([],) * num_groups, True, False)
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    return StepPlan(0, admissions, rows, sum(lengths))
