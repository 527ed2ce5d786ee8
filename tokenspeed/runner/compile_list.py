"""Which kernels a model needs: its twin (`compile_start.twin`) is built on the engine's GPU and goes through the steps
that stand for all, and every kernel that a launch would need is ordered. None runs.

What the libraries compute in those steps does run, on zeros: cuBLAS and torch load their kernels here, beside the
compilation, and not when memory is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tokenspeed.cache.spec import group_layers
from tokenspeed.config.engine import EngineConfig
from tokenspeed.kernels.registry import Need, select_slot_ops
from tokenspeed.kernels.triton.compile_monitor import KernelList, KernelOrder
from tokenspeed.observability.startup import unrecorded
from tokenspeed.runner.compile_start import twin
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.kv_pool import with_pages
from tokenspeed.runner.loaded import bind_pool, load
from tokenspeed.runner.memory import release
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.trial_steps import smallest_step
from tokenspeed.runner.warm_up import warm_up_plans

logger = logging.getLogger(__name__)

UNSET = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


class _Zeroed(TorchFunctionMode):
    """Memory that nobody set is 0. A kernel that did not run leaves its output as it was made, and what it stands for
    may be an index: 0 lies in every table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNSET else made


def list_kernels(config: EngineConfig, order: Callable[[KernelOrder], None]) -> bool:
    """Order every kernel that `config` needs and that was not loaded here before. A failure costs time only: what was
    not listed is compiled when it is first used.

    Returns:
        whether the list is complete.
    """
    try:
        with unrecorded(), KernelList(order), _Zeroed():
            _run(twin(config))
        return True
    except Exception as error:
        logger.warning("not all kernels could be listed for the compile workers: %s: %s", type(error).__name__, error)
        return False
    finally:
        release()


def _run(config: EngineConfig) -> None:
    loaded = load(config)
    assert config.num_pages is not None, "a twin's pool is given"
    groups = group_layers(loaded.model.cache_specs(), config.page_size)
    groups = with_pages(groups, config.num_pages * len(groups))
    bind_pool(config, loaded, groups)
    plans = warm_up_plans(
        config.max_num_seqs,
        config.max_model_len,
        config.max_num_batched_tokens,
        config.page_size,
        len(groups),
        config.model.moe is not None,
    )
    graphs = GraphPlan(config.capture_sizes, config.pad_graphs, config.prefill_sizes, tuple(plans))
    limits = Limits(config.max_num_seqs, config.max_model_len, config.model.vocab_size)
    slot_ops, _ = select_slot_ops(Need(loaded.ops.device, loaded.ops.dtype))
    runner = CudaModelRunner(loaded, slot_ops, groups, limits, graphs)
    try:
        # First what takes longest to compile: drawing with filters.
        runner.execute(smallest_step(config, len(groups))).result()
        runner.capture()
    finally:
        runner.close()
