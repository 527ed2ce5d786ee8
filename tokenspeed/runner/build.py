"""From a resolved configuration to a runner: choose kernels, build the model, load it, size the KV pool."""

from __future__ import annotations

import msgspec
import torch

from tokenspeed.attention.interface import AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config.engine import EngineConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.grammar.build import build_compiler
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.fp8_weights import read_kv_scales
from tokenspeed.loader.load import load_model
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.observability.startup import startup_phase
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.kv_pool import allocate, check_capacity, size_groups
from tokenspeed.runner.model_runner import Limits, ModelRunner

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def build_runner(config: EngineConfig) -> ModelRunner:
    """Build, load and size; nothing is captured yet.

    Raises:
        ConfigError: a choice that cannot run here, or a KV pool too small for one sequence.
        CheckpointError: weights that do not fit the model.
    """
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    # The model is built for the context that is served: positions beyond it never come, so its tables end there.
    model_config = msgspec.structs.replace(config.model, max_position=config.max_model_len)
    grammars, grammar_report = build_compiler(config)
    with startup_phase("weights.target"):
        kv_dtype = None if config.kv_cache_dtype == config.dtype else DTYPES[config.kv_cache_dtype]
        ops, report = select_ops(Need(torch.device(config.device), DTYPES[config.dtype], kv_dtype))
        backend, backend_report = select_backend(_attention_need(config), config.attention_backend, ops)
        scheme = scheme_for(model_config, ops, config.quantize_on_load)
        report += [grammar_report, *backend_report, f"weights: {scheme.name} ({scheme.reason})"]
        model = build_model(model_config, SINGLE, scheme, ops, backend)
        with torch.inference_mode():
            load_model(model, config.checkpoint, model_config, seed=config.seed)
    with startup_phase("kv.build"):
        groups = _build_pool(config, model, ops.device)
    return ModelRunner(
        model,
        backend,
        ops,
        groups,
        Limits(config.max_num_seqs, config.max_model_len),
        model_config.vocab_size,
        config.enforce_eager,
        report,
        grammars,
    )


def _attention_need(config: EngineConfig) -> AttentionNeed:
    return AttentionNeed(
        device=config.device,
        dtype=DTYPES[config.dtype],
        num_heads=config.model.num_heads,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        page_size=config.page_size,
    )


def _build_pool(config: EngineConfig, model: Model, device: torch.device) -> list[GroupSpec]:
    """Size, allocate and bind the KV pool."""
    groups = size_groups(
        model.cache_specs(),
        config.page_size,
        config.num_pages,
        config.kv_memory_bytes or 0,
        config.max_num_seqs * config.max_model_len,
    )
    check_capacity(groups, config.max_model_len)
    pages = allocate(
        groups,
        config.model.num_layers,
        config.model.num_kv_heads,
        config.model.head_dim,
        DTYPES[config.kv_cache_dtype],
        device,
        read_kv_scales(config.checkpoint, config.model.num_layers) if config.kv_cache_dtype == "fp8_e4m3" else None,
    )
    model.bind_kv(list(pages))
    return groups
