"""From a resolved configuration to a runner: choose kernels, build the model, load it, size the KV pool."""

from __future__ import annotations

import torch

from tokenspeed.attention.interface import AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.config.engine import EngineConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.load import load_model
from tokenspeed.models.registry import build_model
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.kv_pool import allocate, check_capacity, size_groups
from tokenspeed.runner.model_runner import Limits, ModelRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_runner(config: EngineConfig) -> ModelRunner:
    """Build, load and size; nothing is captured yet.

    Raises:
        ConfigError: a choice that cannot run here, or a KV pool too small for one sequence.
        CheckpointError: weights that do not fit the model.
    """
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    model_config = config.model
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    ops, report = select_ops(Need(device, dtype))
    need = AttentionNeed(
        device=device.type,
        dtype=dtype,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
    )
    backend, backend_report = select_backend(need, config.attention_backend, ops)
    report += backend_report
    scheme = scheme_for(model_config, ops)
    report.append(f"weights: {scheme.name}")
    model = build_model(model_config, SINGLE, scheme, ops, backend)
    with torch.inference_mode():
        load_model(model, config.checkpoint, model_config, seed=config.seed)
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
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        DTYPES[config.kv_cache_dtype],
        device,
    )
    model.bind_kv(list(pages))
    return ModelRunner(
        model,
        backend,
        ops,
        groups,
        Limits(config.max_num_seqs, config.max_model_len),
        model_config.vocab_size,
        config.enforce_eager,
        report,
    )
