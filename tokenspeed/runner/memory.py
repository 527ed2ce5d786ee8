"""How many pages of KV cache a GPU has room for: measured by running the largest steps, then plain arithmetic.

    |-------------------------------- total ----------------------------------------|
    |------------------- total * utilization -------------------------|   untouched  |
    | others | weights | largest step | graphs |     KV pages         |

`others` is what the process cannot give back: other processes, the CUDA context, loaded kernels.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.cache.capacity import sequence_capacity, sequence_pages
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config.engine import EngineConfig
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.kv_pool import shorter, with_pages

GIB = 2**30
MIB = 2**20
PREFILL_GRAPH_REQUESTS = 8
"""Requests that a recorded prompt step has room for. Attention launches a program for each request, head and query
block; those of padding return at once."""
GRAPH_BYTES = 16 * MIB
"""What the driver keeps for one recorded step of some hundred kernels."""
SLACK_BYTES = 128 * MIB
"""For what neither warm-up shows: fragments of the allocator, library workspaces that appear later."""
MAX_SENSIBLE_UTILIZATION = 0.97

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU.

    Fields:
        total: as the driver reports it.
        others: other processes, CUDA context and kernel code.
        weights: what was allocated before the first step.
        step: what the largest step takes on top.
        graphs: reserve for recorded steps.
    """

    total: int
    others: int
    weights: int
    step: int
    graphs: int

    @property
    def used(self) -> int:
        """Everything except the KV cache."""
        return self.others + self.weights + self.step + self.graphs

    def described(self) -> str:
        """For logs and errors."""
        return (
            f"weights {_gib(self.weights)}, largest step {_gib(self.step)}, graphs {_gib(self.graphs)}, CUDA and other "
            f"processes {_gib(self.others)}"
        )


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What the KV pool has to satisfy.

    Fields:
        groups: the cache groups that share it; their `num_pages` does not count.
        step_tokens: tokens of one sequence in a step, at most.
        num_pages: an explicit size in pages of each group (`--max-total-tokens`), or None.
        pool_bytes: an explicit size in bytes (`--kv-cache-memory-gb`), or None.
    """

    groups: list[GroupSpec]
    max_model_len: int
    step_tokens: int
    utilization: float
    num_pages: int | None = None
    pool_bytes: int | None = None

    @property
    def page_bytes(self) -> int:
        return self.groups[0].page_bytes

    def sequence_tokens(self, num_pages: int) -> int:
        """What one sequence can reach in a pool of so many pages."""
        return sequence_capacity(with_pages(self.groups, num_pages), self.step_tokens) if num_pages else 0

    def total_tokens(self, num_pages: int) -> int:
        """The value of `--max-total-tokens` that stands for so many pages."""
        return num_pages // len(self.groups) * self.groups[0].page_size


def plan_kv_pages(use: MemoryUse, wish: PoolWish) -> int:
    """Pages of the KV pool, without the scratch page that the pool adds.

    Raises:
        ConfigError: the weights and the largest step leave no room, an explicit size does not fit, or one sequence of
            `max_model_len` does not. Names the bytes needed, the bytes there, and the flags that would make it fit.
    """
    budget = int(use.total * wish.utilization)
    room = budget - use.used
    fitting = max(0, room // wish.page_bytes - 1)
    if wish.num_pages is not None:
        num_pages = wish.num_pages * len(wish.groups)
        asked = f"--max-total-tokens {wish.total_tokens(num_pages)}"
    elif wish.pool_bytes is not None:
        num_pages = max(0, wish.pool_bytes // wish.page_bytes - 1)
        asked = f"--kv-cache-memory-gb {wish.pool_bytes / GIB:g}"
    else:
        num_pages, asked = fitting, ""
    needed_pages = sequence_pages(wish.groups, wish.max_model_len, wish.step_tokens)
    if num_pages > fitting:
        raise ConfigError(
            f"{asked} needs {_gib((num_pages + 1) * wish.page_bytes)}, but {_there(use, wish, room)}; it fits with at "
            f"most {wish.total_tokens(fitting)} tokens{_remedies(use, wish, num_pages)}"
        )
    if num_pages >= needed_pages:
        return num_pages
    needed = _gib((needed_pages + 1) * wish.page_bytes)
    if asked:
        raise ConfigError(
            f"one sequence of --max-model-len {wish.max_model_len} needs {needed} of KV cache, but {asked} holds "
            f"{wish.sequence_tokens(num_pages)} tokens of one; raise it, or {shorter(wish.sequence_tokens(num_pages))}"
        )
    longest = wish.sequence_tokens(fitting)
    fits = shorter(longest) if longest else "no context fits"
    raise ConfigError(
        f"one sequence of --max-model-len {wish.max_model_len} needs {needed} of KV cache, but "
        f"{_there(use, wish, room)}; {fits}{_remedies(use, wish, needed_pages)}"
    )


def graph_reserve_bytes(sizes: Sequence[int], vocab_size: int, decode_bytes: int) -> int:
    """Memory that recorded decode steps keep: one set of activations, shared, and each size's own float32 logits."""
    if not sizes:
        return 0
    return decode_bytes + sum(sizes) * vocab_size * 4 + len(sizes) * GRAPH_BYTES


def prefill_reserve_bytes(sizes: Sequence[int], vocab_size: int, prefill_bytes: int, num_tokens: int) -> int:
    """Memory that recorded prompt steps keep: the activations of the largest, and each one's own logits.

    Args:
        prefill_bytes: what a step of `num_tokens` prompt tokens takes.
    """
    if not sizes:
        return 0
    activations = prefill_bytes * max(sizes) // num_tokens
    return activations + len(sizes) * (PREFILL_GRAPH_REQUESTS * vocab_size * 4 + GRAPH_BYTES)


def size_cuda_pool(
    prefill: Callable[[], None],
    decode: Callable[[], None],
    groups: list[GroupSpec],
    config: EngineConfig,
    device: torch.device,
) -> int:
    """Measure this GPU and plan: pages of the KV pool.

    Call after the weights are loaded and before the pool is allocated; both steps run eagerly, on a pool of a page.

    Args:
        prefill: runs a step of `max_num_batched_tokens` prompt tokens with logits of `max_num_seqs` rows, and waits.
        decode: runs a step of `max_num_seqs` (or the largest recorded size of) decode rows, sampling included.
    Raises:
        ConfigError: as `plan_kv_pages`, or a step ran out of memory.
    """
    assert config.gpu_memory_utilization is not None, "a GPU's share is resolved with the device"
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)
    decode_bytes = _peak(decode, weights, device)
    prefill_bytes = _peak(prefill, weights, device)
    free, total = torch.cuda.mem_get_info(device)
    use = MemoryUse(
        total=total,
        others=total - free - torch.cuda.memory_reserved(device),
        weights=weights,
        step=max(decode_bytes, prefill_bytes) + SLACK_BYTES,
        graphs=graph_reserve_bytes(config.capture_sizes, config.model.vocab_size, decode_bytes)
        + prefill_reserve_bytes(
            config.prefill_sizes, config.model.vocab_size, prefill_bytes, config.max_num_batched_tokens
        ),
    )
    wish = PoolWish(
        groups=groups,
        max_model_len=config.max_model_len,
        step_tokens=config.max_num_batched_tokens,
        utilization=config.gpu_memory_utilization,
        num_pages=config.num_pages,
        pool_bytes=config.kv_memory_bytes,
    )
    num_pages = plan_kv_pages(use, wish)
    logger.info(
        "KV pool: %d pages of %d tokens, %s of %s (%s)",
        num_pages,
        config.page_size,
        _gib(num_pages * wish.page_bytes),
        _gib(total),
        use.described(),
    )
    return num_pages


def _peak(step: Callable[[], None], before: int, device: torch.device) -> int:
    """Bytes that the allocator took from the driver, above `before`, to run `step`.

    Reserved, not allocated: what the allocator holds is what the pool cannot have. The blocks stay cached, so the first
    real step asks the driver for nothing.
    """
    torch.cuda.reset_peak_memory_stats(device)
    try:
        step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"the largest step does not fit beside the weights ({_gib(before)} of {_gib(total)}, {_gib(free)} free): "
            "lower --chunked-prefill-size or --max-num-seqs"
        ) from error
    return max(0, torch.cuda.max_memory_reserved(device) - before)


def _there(use: MemoryUse, wish: PoolWish, room: int) -> str:
    share = f"--gpu-memory-utilization {wish.utilization:g} of {_gib(use.total)}"
    if room < 0:
        return f"{share} is {_gib(-room)} short already ({use.described()})"
    return f"{share} leaves {_gib(room)} ({use.described()})"


def _remedies(use: MemoryUse, wish: PoolWish, num_pages: int) -> str:
    """Flags that would make `num_pages` fit, where they can."""
    wanted = (use.used + (num_pages + 1) * wish.page_bytes) / use.total
    rounded = math.ceil(wanted * 100) / 100
    found = []
    if wish.utilization < rounded <= MAX_SENSIBLE_UTILIZATION:
        found.append(f"raise --gpu-memory-utilization to {rounded:g}")
    found.append("lower --chunked-prefill-size or --max-num-seqs (a smaller largest step)")
    if use.graphs > GIB:
        found.append("lower --max-cudagraph-capture-size or --prefill-graph-max-tokens")
    return "".join(f", or {remedy}" for remedy in found)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
