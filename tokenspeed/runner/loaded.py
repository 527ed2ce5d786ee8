"""A loaded model and what was chosen for it: kernels, attention backend, quantization scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config.engine import EngineConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.fp8_weights import read_kv_scales
from tokenspeed.loader.kept_bytes import Kept
from tokenspeed.loader.load import load_model
from tokenspeed.loader.weights import CheckpointWeight
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import SelectedMoe, moe_need, select_moe
from tokenspeed.observability.startup import startup_phase
from tokenspeed.quantization.interface import Scheme
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.kv_pool import allocate
from tokenspeed.runner.weight_room import WeightRoom

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. `report` says what was chosen and why."""

    model: Model
    ops: Ops
    backend: AttentionBackend
    report: list[str]


def load(config: EngineConfig, room: WeightRoom | None = None) -> LoadedModel:
    """Choose kernels for the device, build the model and load its weights.

    Args:
        room: of the GPU that the weights go to; None = they are not compared with it.
    Raises:
        ConfigError: a choice that cannot run here, or weights without room.
        CheckpointError: weights that do not fit the model.
    """
    # The model is built for the context that is served: positions beyond it never come, so its tables end there.
    model_config = msgspec.structs.replace(config.model, max_position=config.max_model_len)
    kv_dtype = None if config.kv_cache_dtype == config.dtype else DTYPES[config.kv_cache_dtype]
    ops, report = select_ops(Need(torch.device(config.device), DTYPES[config.dtype], kv_dtype))
    backend, backend_report = select_backend(_attention_need(config), config.attention_backend, ops)
    scheme = scheme_for(model_config, ops, config.quantize_on_load)
    moe, moe_report = _experts(config, scheme, ops)
    report += [*backend_report, *moe_report, f"weights: {scheme.name} ({scheme.reason})"]
    with torch.inference_mode():
        with startup_phase("weights.allocate"):
            model = build_model(model_config, SINGLE, scheme, ops, backend, moe)

        def approve(weights: Sequence[CheckpointWeight]) -> None:
            if room is not None:
                in_e4m3 = ops.fp8_linear is not None, scheme.expert_format == "fp8_block"
                room.check(weights, Kept(ops.dtype, scheme.quantizes, *in_e4m3))

        load_model(model, config.checkpoint, model_config, seed=config.seed, approve=approve)
    return LoadedModel(model, ops, backend, report)


def bind_pool(config: EngineConfig, loaded: LoadedModel, groups: list[GroupSpec]) -> None:
    """Allocate the pages of `groups` and give them to the model, in place of any it had."""
    scaled = config.kv_cache_dtype == "fp8_e4m3"
    pages = allocate(
        loaded.model.cache_specs(),
        groups,
        config.model.num_kv_heads,
        config.model.head_dim,
        DTYPES[config.kv_cache_dtype],
        loaded.ops.device,
        read_kv_scales(config.checkpoint, config.model.num_layers) if scaled else None,
    )
    loaded.model.bind_kv(list(pages))


def _experts(config: EngineConfig, scheme: Scheme, ops: Ops) -> tuple[SelectedMoe | None, list[str]]:
    """What runs the experts and the lines for the log; nothing in a dense model."""
    if config.model.moe is None:
        return None, []
    need = moe_need(config.model, SINGLE, scheme.expert_format, ops)
    return select_moe(need, config.moe_backend, ops)


def _capability(config: EngineConfig) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if config.device == "cuda" else None


def _attention_need(config: EngineConfig) -> AttentionNeed:
    """What one backend must do for all layers: a window counts if any layer has one."""
    windows = [window for window in config.model.layer_windows if window is not None]
    return AttentionNeed(
        device=config.device,
        dtype=DTYPES[config.dtype],
        num_heads=config.model.num_heads,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        page_size=config.page_size,
        window=min(windows, default=None),
        has_sinks=config.model.attention_sinks,
        logit_cap=config.model.attention_logit_cap,
        kv_dtype=DTYPES[config.kv_cache_dtype],
        capability=_capability(config),
    )
