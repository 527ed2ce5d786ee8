"""The runner on a GPU: kernels compile beside the load, the KV pool takes what the largest steps leave."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from tokenspeed.cache.capacity import cache_profile
from tokenspeed.cache.spec import GroupSpec, group_layers
from tokenspeed.config.engine import EngineConfig
from tokenspeed.grammar.build import build_compiler
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.registry import Need, select_slot_ops
from tokenspeed.kernels.triton.compile_monitor import VARIABLE, CompileMonitor, place_kernel
from tokenspeed.observability.startup import count_compiles, startup_phase
from tokenspeed.protocol.step import StepPlan
from tokenspeed.runner.compile import start_compile
from tokenspeed.runner.compile_list import list_kernels
from tokenspeed.runner.compile_start import Workers
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.kv_pool import with_pages
from tokenspeed.runner.loaded import LoadedModel, bind_pool, load
from tokenspeed.runner.memory import TrialSteps, release, size_cuda_pool
from tokenspeed.runner.memory_errors import MemoryErrors
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.trial_steps import NUM_PAGES, decode_step, long_prompts_step, many_prompts_step, recorded_step
from tokenspeed.runner.warm_up import checking_plans, warm_up_plans
from tokenspeed.runner.weight_room import WeightRoom


def build_cuda_runner(config: EngineConfig, workers: Workers | None = None) -> CudaModelRunner:
    """Build, load and size; nothing is recorded yet.

    Args:
        workers: to compile kernels, started before; they end here.
    Raises:
        ConfigError: a choice that cannot run here, or no room for the weights, a step or one sequence.
        CheckpointError: weights that do not fit the model.
    """
    monitor = CompileMonitor(os.environ.get(VARIABLE, "off"))
    monitor.install()
    count_compiles(monitor.totals)
    grammars, grammar_report = build_compiler(config)
    errors = MemoryErrors(config)
    is_listed = False
    with start_compile(config, workers) as job:
        if job.takes_orders:
            with startup_phase("kernels.list"):
                is_listed = list_kernels(config, job.order)
        room = WeightRoom(config)
        with startup_phase("weights.target"), errors.during("load", lambda: room.kept):
            loaded = load(config, room)
        with startup_phase("kernels.compile"):
            compile_report = job.wait(is_listed, place_kernel)
        num_loaded = monitor.num_met
    with startup_phase("kv.build"):
        groups = _size(config, loaded)
        release()
        with errors.during("pool", lambda: (groups[0].num_pages + 1) * groups[0].page_bytes):
            bind_pool(config, loaded, groups)
    budget = config.max_num_batched_tokens
    has_experts = config.model.moe is not None
    warm_up = warm_up_plans(
        config.max_num_seqs, config.max_model_len, budget, config.page_size, len(groups), has_experts
    )
    if is_listed and job.has_loaded_all and monitor.num_met == num_loaded:  # the trial steps found all they need
        warm_up = checking_plans(warm_up)
    graphs = GraphPlan(
        sizes=config.capture_sizes,
        pad=config.pad_graphs,
        prefill_sizes=config.prefill_sizes,
        warm_up=tuple(warm_up),
        ready=monitor.serving,
        memory_errors=errors,
    )
    profile = cache_profile(groups, config.max_model_len, budget)
    loaded = replace(loaded, report=[grammar_report, compile_report, *loaded.report, profile.described()])
    with startup_phase("executor.init"):
        return _runner(config, loaded, groups, graphs, grammars)


def _runner(
    config: EngineConfig,
    loaded: LoadedModel,
    groups: list[GroupSpec],
    graphs: GraphPlan,
    grammars: GrammarCompiler | None = None,
) -> CudaModelRunner:
    limits = Limits(config.max_num_seqs, config.max_model_len, config.model.vocab_size)
    slot_ops, report = select_slot_ops(Need(loaded.ops.device, loaded.ops.dtype))
    loaded = replace(loaded, report=[*loaded.report, *report])
    return CudaModelRunner(loaded, slot_ops, groups, limits, graphs, grammars)


def _size(config: EngineConfig, loaded: LoadedModel) -> list[GroupSpec]:
    """Cache groups with the pages that fit beside the largest steps, which run here on a pool of scratch."""
    groups = group_layers(loaded.model.cache_specs(), config.page_size)
    can_record = loaded.ops.recorder is not None and loaded.backend.can_record
    with MemoryErrors(config).during("trial"):
        scratch = with_pages(groups, NUM_PAGES)
        bind_pool(config, loaded, scratch)
        runner = _runner(config, loaded, scratch, GraphPlan())
    try:
        trial = TrialSteps(
            recorded=partial(_run, runner, recorded_step(config, len(groups)))
            if can_record and config.capture_sizes
            else None,
            decode=partial(_run, runner, decode_step(config, len(groups))),
            prompts=[
                partial(_run, runner, long_prompts_step(config, len(groups))),
                partial(_run, runner, many_prompts_step(config, len(groups))),
            ],
        )
        num_pages = size_cuda_pool(trial, groups, config, records_prompts=can_record)
    finally:
        runner.close()
    return with_pages(groups, num_pages)


def _run(runner: CudaModelRunner, plan: StepPlan) -> None:
    runner.execute(plan).result()
