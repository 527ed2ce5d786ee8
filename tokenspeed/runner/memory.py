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
from tokenspeed.runner.device_state import table_width
from tokenspeed.runner.kv_pool import shorter, with_pages
from tokenspeed.runner.loaded import DTYPES
from tokenspeed.runner.memory_errors import GIB, MAX_SENSIBLE_UTILIZATION, MemoryErrors, gib, quantizing
from tokenspeed.runner.slot_graphs import input_bytes

MIB = 2**20
PREFILL_GRAPH_REQUESTS = 8
"""Requests that a recorded prompt step has room for. Attention launches a program for each request, head and query
block; those of padding return at once."""
DECODE_GRAPH_BYTES = 16 * MIB
"""What the driver keeps for one recorded decode step of some hundred kernels."""
PREFILL_GRAPH_BYTES = 42 * MIB
PREFILL_ONCE_BYTES = 102 * MIB
"""What one recorded prompt step keeps, and what the first of them takes besides, once. One H200, MiB more with each of
these token counts, recorded one after the other: Qwen3-8B 768: 102, 896: 42, 640: 2; gpt-oss-20b 98, 2, 0. The dearest
of each is reserved: what most sizes leave of it is room for the sizes that were not measured."""
SLACK_BYTES = 256 * MIB
"""For what neither warm-up shows: fragments of the allocator, which can give nothing back while a step is recorded, and
library workspaces that appear later."""
NARROW = "use --kv-cache-dtype fp8 (a byte for each number of the KV cache)"

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
            f"weights {gib(self.weights)}, largest step {gib(self.step)}, graphs {gib(self.graphs)}, CUDA and other "
            f"processes {gib(self.others)}"
        )


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What the KV pool has to satisfy.

    Fields:
        groups: the cache groups that share it; their `num_pages` does not count.
        step_tokens: tokens of one sequence in a step, at most.
        num_pages: an explicit size in pages of each group (`--max-total-tokens`), or None.
        pool_bytes: an explicit size in bytes (`--kv-cache-memory-gb`), or None.
        number_bytes: of a number in the pool. has_e4m3: it may be one.
        lighter: flags with which the weights would take about half, if there are any.
    """

    groups: list[GroupSpec]
    max_model_len: int
    step_tokens: int
    utilization: float
    num_pages: int | None = None
    pool_bytes: int | None = None
    number_bytes: int = 1
    has_e4m3: bool = True
    lighter: Sequence[str] = ()

    @property
    def can_narrow(self) -> bool:
        """A number may take fewer bytes than it does."""
        return self.has_e4m3 and self.number_bytes > 1

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
            f"{asked} needs {gib((num_pages + 1) * wish.page_bytes)}, but {_there(use, wish, room)}; it fits with at "
            f"most {wish.total_tokens(fitting)} tokens{_remedies(use, wish, num_pages)}"
        )
    if num_pages >= needed_pages:
        return num_pages
    needed = gib((needed_pages + 1) * wish.page_bytes)
    if asked:
        holds = wish.sequence_tokens(num_pages)
        narrow_bytes = (needed_pages + 1) * wish.page_bytes // wish.number_bytes
        is_enough = wish.pool_bytes is not None and wish.can_narrow and narrow_bytes <= wish.pool_bytes
        raise ConfigError(
            f"one sequence of --max-model-len {wish.max_model_len} needs {needed} of KV cache, but {asked} holds "
            f"{holds} tokens of one; raise it, or {shorter(holds)}{f', or {NARROW}' if is_enough else ''}"
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
    return decode_bytes + sum(sizes) * vocab_size * 4 + len(sizes) * DECODE_GRAPH_BYTES


def graph_input_bytes(
    decode_sizes: Sequence[int], prefill_sizes: Sequence[int], num_groups: int, max_pages: int
) -> int:
    """Memory of the buffers that recorded steps read, each size's own: above all a page table of `max_pages` a row,
    2 KiB at 32768 tokens of context in pages of 64, and 128 KiB in pages of one."""
    decodes = sum(input_bytes(num_groups, max_pages, size, size, has_wanted=False) for size in decode_sizes)
    prompts = (
        input_bytes(num_groups, max_pages, size, min(size, PREFILL_GRAPH_REQUESTS), has_wanted=True)
        for size in prefill_sizes
    )
    return decodes + sum(prompts)


def eager_table_bytes(num_groups: int, num_rows: int, max_pages: int) -> int:
    """Page tables that a step gathers which is not recorded. Those of trial steps are as narrow as their contexts are
    short."""
    return num_groups * num_rows * max_pages * torch.int32.itemsize


def prefill_reserve_bytes(sizes: Sequence[int], vocab_size: int, prefill_bytes: int, num_tokens: int) -> int:
    """Memory that recorded prompt steps keep: the activations of the largest, what comes once, and each one's own.

    Args:
        prefill_bytes: what a step of `num_tokens` prompt tokens takes.
    """
    if not sizes:
        return 0
    activations = prefill_bytes * max(sizes) // num_tokens
    each = PREFILL_GRAPH_REQUESTS * vocab_size * 4 + PREFILL_GRAPH_BYTES
    return activations + PREFILL_ONCE_BYTES + len(sizes) * each


@dataclass(frozen=True, slots=True)
class TrialSteps:
    """Steps that are run to be measured, one by one and on a pool of a page; each returns when the device has done it.

    Fields:
        recorded: what the largest decode graph holds; None when no decode step is recorded.
        decode: as many decode rows as can come, with all that rows may ask of the sampler.
        prompts: as many prompt tokens as can come, in many prompts and in few, sampled likewise.
    """

    recorded: Callable[[], None] | None
    decode: Callable[[], None]
    prompts: Sequence[Callable[[], None]]


def size_cuda_pool(trial: TrialSteps, groups: list[GroupSpec], config: EngineConfig, records_prompts: bool) -> int:
    """Measure the current GPU and plan: pages of the KV pool.

    Call after the weights are loaded and before the pool is allocated. A grammar's masks are in no trial: a row that
    has one is copied once, less than bias and penalties take of it.

    Args:
        records_prompts: the prompt steps of `config.prefill_sizes` will be recorded.
    Raises:
        ConfigError: as `plan_kv_pages`, or a step ran out of memory.
    """
    assert config.gpu_memory_utilization is not None, "a GPU's share is resolved with the device"
    release()
    weights, vocab_size = torch.cuda.memory_reserved(), config.model.vocab_size
    with MemoryErrors(config).during("trial"):
        recorded_bytes = 0 if trial.recorded is None else _peak(trial.recorded, weights)
        decode_bytes = _peak(trial.decode, weights)
        prefill_bytes = max(_peak(step, weights) for step in trial.prompts)
    free, total = torch.cuda.mem_get_info()
    decode_sizes = config.capture_sizes if trial.recorded is not None else ()
    prefill_sizes = config.prefill_sizes if records_prompts else ()
    max_pages = table_width(config.max_model_len, config.page_size)
    tables_bytes = eager_table_bytes(len(groups), config.max_num_seqs, max_pages)
    use = MemoryUse(
        total=total,
        others=total - free - torch.cuda.memory_reserved(),
        weights=weights,
        step=max(recorded_bytes, decode_bytes, prefill_bytes) + tables_bytes + SLACK_BYTES,
        graphs=graph_reserve_bytes(decode_sizes, vocab_size, recorded_bytes)
        + prefill_reserve_bytes(prefill_sizes, vocab_size, prefill_bytes, config.max_num_batched_tokens)
        + graph_input_bytes(decode_sizes, prefill_sizes, len(groups), max_pages),
    )
    wish = PoolWish(
        groups=groups,
        max_model_len=config.max_model_len,
        step_tokens=config.max_num_batched_tokens,
        utilization=config.gpu_memory_utilization,
        num_pages=config.num_pages,
        pool_bytes=config.kv_memory_bytes,
        number_bytes=DTYPES[config.kv_cache_dtype].itemsize,
        has_e4m3=config.has_e4m3,
        lighter=quantizing(config),
    )
    num_pages = plan_kv_pages(use, wish)
    logger.info(
        "KV pool: %d pages of %d tokens, %s of %s (%s)",
        num_pages,
        config.page_size,
        gib(num_pages * wish.page_bytes),
        gib(total),
        use.described(),
    )
    return num_pages


def release() -> None:
    """Give back what torch's allocator keeps and nobody uses. It keeps blocks by stream, so that another runner, which
    has a stream of its own, would not get those of the trial."""
    gc.collect()
    torch.cuda.empty_cache()


def _peak(step: Callable[[], None], before: int) -> int:
    """Bytes that the allocator took from the driver, above `before`, to run `step`.

    Reserved, not allocated: what the allocator holds is what the pool cannot have.
    """
    torch.cuda.empty_cache()  # what is left of the step before is no part of this one
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_reserved() - before)


def _there(use: MemoryUse, wish: PoolWish, room: int) -> str:
    share = f"--gpu-memory-utilization {wish.utilization:g} of {gib(use.total)}"
    if room < 0:
        return f"{share} is {gib(-room)} short already ({use.described()})"
    return f"{share} leaves {gib(room)} ({use.described()})"


def _remedies(use: MemoryUse, wish: PoolWish, num_pages: int) -> str:
    """Flags that would make `num_pages` fit, where they can."""
    wanted = (use.used + (num_pages + 1) * wish.page_bytes) / use.total
    rounded = math.ceil(wanted * 100) / 100
    found = []
    budget = int(use.total * wish.utilization)
    pool_bytes = (num_pages + 1) * wish.page_bytes
    if wish.pool_bytes is None and wish.can_narrow and use.used + pool_bytes // wish.number_bytes <= budget:
        found.append(NARROW)
    if use.used - use.weights // 3 + pool_bytes <= budget:
        found += wish.lighter
    if wish.utilization < rounded <= MAX_SENSIBLE_UTILIZATION:
        found.append(f"raise --gpu-memory-utilization to {rounded:g}")
    found.append("lower --chunked-prefill-size or --max-num-seqs (a smaller largest step)")
    if use.graphs > GIB:
        found.append("lower --max-cudagraph-capture-size or --prefill-graph-max-tokens")
    return "".join(f", or {remedy}" for remedy in found)
