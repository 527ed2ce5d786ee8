"""From a resolved configuration to a runner: load the model, size the KV pool, put a runner around both."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenspeed.cache.capacity import cache_profile
from tokenspeed.config.engine import EngineConfig
from tokenspeed.grammar.build import build_compiler
from tokenspeed.observability.startup import startup_phase
from tokenspeed.runner.compile_start import Workers
from tokenspeed.runner.interface import Runner
from tokenspeed.runner.kv_pool import check_capacity, size_groups
from tokenspeed.runner.loaded import bind_pool, load
from tokenspeed.runner.model_runner import Limits, ModelRunner


def build_runner(config: EngineConfig, workers: Workers | None = None) -> Runner:
    """Build, load and size; nothing is captured yet.

    Args:
        workers: to compile a GPU's kernels, started before torch was imported; None = they are started here.
    Raises:
        ConfigError: a choice that cannot run here, or a KV pool too small for one sequence.
        CheckpointError: weights that do not fit the model.
    """
    if config.device == "cuda":
        from tokenspeed.runner.build_cuda import build_cuda_runner  # needs Triton

        return build_cuda_runner(config, workers)
    return build_cpu_runner(config)


def build_cpu_runner(config: EngineConfig) -> ModelRunner:
    """See `build_runner`."""
    torch.set_num_threads(config.num_threads)
    grammars, grammar_report = build_compiler(config)
    with startup_phase("weights.target"):
        loaded = load(config)
    with startup_phase("kv.build"):
        groups = size_groups(
            loaded.model.cache_specs(),
            config.page_size,
            config.num_pages,
            config.kv_memory_bytes or 0,
            config.max_num_seqs,
            config.max_model_len,
            config.max_num_batched_tokens,
        )
        check_capacity(groups, config.max_model_len, config.max_num_batched_tokens)
        bind_pool(config, loaded, groups)
    profile = cache_profile(groups, config.max_model_len, config.max_num_batched_tokens)
    loaded = replace(loaded, report=[grammar_report, *loaded.report, profile.described()])
    limits = Limits(config.max_num_seqs, config.max_model_len, config.model.vocab_size)
    with startup_phase("executor.init"):
        return ModelRunner(loaded, groups, limits, config.enforce_eager, grammars)
