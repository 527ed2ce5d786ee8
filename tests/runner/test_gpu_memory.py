"""Pages of a GPU's KV pool: the arithmetic, what its errors name, and the measuring with a made-up torch.cuda."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config import gpu_choices
from tokenspeed.config.gpu_choices import MAX_PREFILL_TOKENS, prefill_ladder
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.protocol.step import Admission, Row
from tokenspeed.runner import memory
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.device_state import DeviceState, table_width
from tokenspeed.runner.memory import (
    DECODE_GRAPH_BYTES,
    MIB,
    PREFILL_GRAPH_BYTES,
    PREFILL_GRAPH_REQUESTS,
    PREFILL_ONCE_BYTES,
    SLACK_BYTES,
    MemoryUse,
    PoolWish,
    TrialSteps,
    eager_table_bytes,
    graph_input_bytes,
    graph_reserve_bytes,
    plan_kv_pages,
    prefill_reserve_bytes,
    size_cuda_pool,
)
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.warm_up import GREEDY

GIB = 2**30
USE = MemoryUse(total=100 * GIB, others=GIB, weights=16 * GIB, step=2 * GIB, graphs=GIB)
PAGE = 9 * 2**20  # 64 tokens of Qwen3-8B


def wish(**changes) -> PoolWish:
    groups = [GroupSpec("full", "full", 64, changes.pop("page_bytes", PAGE), 0)]
    about = {"groups": groups, "max_model_len": 4096, "step_tokens": 512, "utilization": 0.9}
    return PoolWish(**{**about, **changes})


MIXED = [
    GroupSpec("sliding", "sliding_window", 64, PAGE, 0, window=128),
    GroupSpec("full", "full", 64, PAGE, 0),
]


def refused(use: MemoryUse, asked: PoolWish) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_kv_pages(use, asked)
    return str(raised.value)


def test_the_pool_takes_what_is_left():
    assert plan_kv_pages(USE, wish()) == (90 - 20) * GIB // PAGE - 1


@given(
    total=some.integers(1, 200),
    parts=some.tuples(*[some.integers(0, 30)] * 4),
    utilization=some.floats(0.05, 1),
    page=some.integers(1, 2**25),
    length=some.integers(1, 10**6),
)
def test_what_is_planned_fits_and_holds_a_sequence(total, parts, utilization, page, length):
    use = MemoryUse(total * GIB, *(part * GIB for part in parts))
    asked = wish(utilization=utilization, page_bytes=page, max_model_len=length)
    try:
        pages = plan_kv_pages(use, asked)
    except ConfigError:
        needed = (-(-length // 64) + 1) * page
        assert use.used + needed > int(use.total * utilization)
        return
    assert use.used + (pages + 1) * page <= int(use.total * utilization) < use.used + (pages + 2) * page
    assert pages * 64 >= length


def test_explicit_sizes_are_taken_as_they_are():
    assert plan_kv_pages(USE, wish(num_pages=100)) == 100
    assert plan_kv_pages(USE, wish(pool_bytes=GIB)) == GIB // PAGE - 1


def test_a_context_that_does_not_fit_says_what_does():
    message = refused(USE, wish(max_model_len=10**6, utilization=0.3))
    fits = int(re.search(r"set --max-model-len to (\d+) or less", message)[1])
    assert "--max-model-len 1000000 needs" in message and "leaves 10.00 GiB" in message
    assert plan_kv_pages(USE, wish(max_model_len=fits, utilization=0.3)) * 64 == fits
    with pytest.raises(ConfigError):
        plan_kv_pages(USE, wish(max_model_len=fits + 1, utilization=0.3))


def test_the_share_that_is_suggested_is_enough():
    asked = wish(max_model_len=200_000, utilization=0.3)
    share = float(re.search(r"raise --gpu-memory-utilization to ([\d.]+)", refused(USE, asked))[1])
    assert plan_kv_pages(USE, wish(max_model_len=200_000, utilization=share)) * 64 >= 200_000
    with pytest.raises(ConfigError):
        plan_kv_pages(USE, wish(max_model_len=200_000, utilization=share - 0.01))


def test_no_share_is_suggested_that_would_not_do():
    assert "raise --gpu-memory-utilization" not in refused(USE, wish(max_model_len=10**6, utilization=0.9))


def test_weights_that_leave_nothing():
    message = refused(MemoryUse(24 * GIB, GIB, 23 * GIB, GIB, 2 * GIB), wish())
    for part in ("short already", "weights 23.00 GiB", "no context fits", "--chunked-prefill-size", "--max-num-seqs"):
        assert part in message, message
    assert "--max-cudagraph-capture-size" in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_pages": 10**6}, ["--max-total-tokens 64000000", "at most", "tokens"]),
        ({"pool_bytes": 80 * GIB}, ["--kv-cache-memory-gb 80", "leaves 70.00 GiB"]),
        ({"num_pages": 10}, ["--max-model-len 4096", "--max-total-tokens 640", "640 tokens", "to 640"]),
        ({"pool_bytes": 5 * PAGE}, ["--kv-cache-memory-gb", "256 tokens"]),
    ],
)
def test_explicit_sizes_that_cannot_be(changes, parts):
    message = refused(USE, wish(**changes))
    for part in parts:
        assert part in message, message


def test_groups_share_a_pool():
    """A window of 128 and a step of 512 touch 639 tokens, on 11 pages at most, whatever the context."""
    assert plan_kv_pages(USE, wish(groups=MIXED)) == plan_kv_pages(USE, wish())
    assert plan_kv_pages(USE, wish(groups=MIXED, num_pages=100)) == 200
    pool = 75 * PAGE
    assert plan_kv_pages(USE, wish(groups=MIXED, max_model_len=63 * 64, pool_bytes=pool)) == 74
    message = refused(USE, wish(groups=MIXED, max_model_len=63 * 64 + 1, pool_bytes=pool))
    assert f"needs {(64 + 11 + 1) * PAGE / GIB:.2f} GiB" in message and "set --max-model-len to 4032 or less" in message
    message = refused(USE, wish(groups=MIXED, num_pages=10**6))
    fits = int(re.search(r"at most (\d+) tokens", message)[1])
    assert plan_kv_pages(USE, wish(groups=MIXED, num_pages=fits // 64)) == 2 * fits // 64
    assert "--max-total-tokens 64000000" in message
    with pytest.raises(ConfigError):
        plan_kv_pages(USE, wish(groups=MIXED, num_pages=fits // 64 + 1))


def test_graph_reserve():
    assert graph_reserve_bytes((), 1000, GIB) == 0
    assert graph_reserve_bytes((1, 8), 1000, 500) == 500 + 9 * 1000 * 4 + 2 * DECODE_GRAPH_BYTES
    assert prefill_reserve_bytes((), 1000, GIB, 8192) == 0
    each = PREFILL_GRAPH_REQUESTS * 1000 * 4 + PREFILL_GRAPH_BYTES
    assert prefill_reserve_bytes((16, 512), 1000, GIB, 8192) == GIB // 16 + PREFILL_ONCE_BYTES + 2 * each


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("windows", [(None, None), (4, None)])
def test_the_buffers_of_recorded_steps_are_counted(page_size, windows):
    """Regression: each graph's own page tables were not, 1.4 GB for a ladder up to 512 rows at 131072 tokens of context
    in pages of one; recording then failed."""
    kinds = ["full" if window is None else "sliding" for window in windows]
    groups = [GroupSpec(kind, kind, page_size, 9, 5, window) for kind, window in zip(kinds, windows, strict=True)]
    state = DeviceState(17, 1000, groups, torch.device("cpu"))
    others = (None, None, types.SimpleNamespace(), None, state, None, 16)
    sizes, prompts = (1, 4, 16), (4, 32)
    made = [DecodeGraphs(*others)._buffers(size) for size in sizes]
    made += [PrefillGraphs(*others)._buffers(size) for size in prompts]
    parts = [getattr(buffers, field.name) for buffers in made for field in dataclasses.fields(buffers)]
    kept = sum(part.nbytes for part in parts if part is not None)
    max_pages = table_width(1000, page_size)
    assert kept <= graph_input_bytes(sizes, prompts, len(groups), max_pages) <= 1.2 * kept
    slots = list(range(16))
    state.admit(Admission(0, "r", 0, [0] * 1000, 1000, tuple([0] * max_pages for _ in groups), GREEDY))
    rows = [Row(slot, 999 if slot == 0 else 0, 1, tuple([] for _ in groups), True, True) for slot in slots]
    batch = state.gather(rows).batch
    tables = [batch.page_table, *(other.page_table for other in batch.other_groups)]
    gathered = sum(table.nbytes for table in tables)
    assert gathered <= eager_table_bytes(len(groups), len(rows), max_pages) <= 1.1 * gathered


MEASURED_MIB = {"Qwen3-8B": (102, 42, 2), "gpt-oss-20b": (98, 2, 0)}
"""With each prompt size that was recorded after others: see `memory.PREFILL_GRAPH_BYTES`."""


@pytest.mark.parametrize("model", MEASURED_MIB)
def test_the_reserve_covers_what_was_measured(model):
    """Regression: 16 MiB a size, and nothing for what comes once, were below it for each of three sizes."""
    kept = 0
    for count, measured_mib in enumerate(MEASURED_MIB[model], 1):
        kept += measured_mib * MIB
        assert prefill_reserve_bytes(range(640, 640 + count), 0, 0, 8192) >= kept


def test_the_default_ladder_has_room_for_sizes_as_dear_as_the_dearest():
    ladder = prefill_ladder(MAX_PREFILL_TOKENS)
    most = max(each for _, *others in MEASURED_MIB.values() for each in others)
    assert prefill_reserve_bytes(ladder, 0, 0, 8192) >= (102 + len(ladder) * most) * MIB


def test_the_figures_stand_at_one_place():
    """Regression: the ladder's reasons named another figure than was reserved."""
    assert "MiB" not in inspect.getsource(gpu_choices) and "`runner.memory`" in inspect.getsource(gpu_choices)


NARROW = "--kv-cache-dtype fp8"


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({"max_model_len": 70_000, "number_bytes": 2}, True),
        ({"max_model_len": 70_000, "number_bytes": 1}, False),  # it is fp8 already
        ({"max_model_len": 200_000, "number_bytes": 2}, False),  # half is too much as well
        ({"num_pages": 1000, "number_bytes": 2}, True),
        ({"num_pages": 1000, "number_bytes": 2, "has_e4m3": False}, False),  # the GPU has none
        ({"pool_bytes": 5 * GIB, "max_model_len": 60_000, "number_bytes": 2, "has_e4m3": False}, False),
        ({"pool_bytes": 20 * GIB, "number_bytes": 2}, False),  # so many bytes, whatever they hold
        ({"pool_bytes": 5 * GIB, "max_model_len": 60_000, "number_bytes": 2}, True),
        ({"pool_bytes": 3 * GIB, "max_model_len": 60_000, "number_bytes": 2}, False),
    ],
)
def test_an_8_bit_cache_is_named_where_it_is_enough(changes, is_named):
    """6 GiB are there; a page of 64 tokens takes 9 MiB."""
    about = {"utilization": 0.3, "max_model_len": 4096, **changes}
    use = MemoryUse(USE.total, USE.others, USE.weights, USE.step, USE.graphs + 4 * GIB)
    message = refused(use, wish(**about))
    assert (NARROW in message) == is_named, message
    if is_named and "pool_bytes" not in changes:
        assert plan_kv_pages(use, wish(**{**about, "page_bytes": PAGE // 2}))


def test_lighter_weights_are_named_where_they_are_enough():
    flag = "use --quantization fp8"
    use = MemoryUse(24 * GIB, GIB, 18 * GIB, GIB, GIB)
    assert flag in refused(use, wish(lighter=[flag], utilization=0.88))
    assert flag not in refused(use, wish(lighter=[], utilization=0.88))
    assert flag not in refused(use, wish(lighter=[flag], utilization=0.88, max_model_len=10**6))


class FakeCuda:
    """An allocator that keeps what it has once taken until it is told to give it back, and a driver that counts."""

    def __init__(self, total: int, others: int, weights: int) -> None:
        self.total, self.others, self.weights = total, others, weights
        self.reserved = self.peak = weights

    def take(self, nbytes: int) -> None:
        """So many bytes are in use for a while, beside the weights."""
        if self.others + self.weights + nbytes > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes / GIB:.2f} GiB.")
        self.reserved = max(self.reserved, self.weights + nbytes)
        self.peak = max(self.peak, self.reserved)

    def face(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            empty_cache=lambda: setattr(self, "reserved", self.weights),
            memory_reserved=lambda: self.reserved,
            max_memory_reserved=lambda: self.peak,
            reset_peak_memory_stats=lambda: setattr(self, "peak", self.reserved),
            synchronize=lambda: None,
            mem_get_info=lambda: (self.total - self.others - self.reserved, self.total),
        )


MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 1024


def config(**changes) -> types.SimpleNamespace:
    about = {
        "gpu_memory_utilization": 0.9,
        "capture_sizes": (1, 2),
        "prefill_sizes": (16, 64),
        "max_num_batched_tokens": 512,
        "model": types.SimpleNamespace(vocab_size=1000, quantization=None, qtype=None),
        "page_size": 64,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "num_pages": None,
        "kv_memory_bytes": None,
        "kv_cache_dtype": "bfloat16",
        "dtype": "bfloat16",
        "quantize_on_load": None,
        "has_e4m3": True,
    }
    return types.SimpleNamespace(**{**about, **changes})


def measured(
    cuda: FakeCuda, recorded: int | None, decode: int, prefill: int, records_prompts: bool = True, page_size: int = 64
) -> int:
    def loading() -> None:
        cuda.take(prefill)
        cuda.others += GIB  # kernels are loaded

    trial = TrialSteps(
        recorded=None if recorded is None else lambda: cuda.take(recorded),
        decode=lambda: cuda.take(decode),
        prompts=[loading, lambda: cuda.take(GIB)],
    )
    groups = [GroupSpec("full", "full", page_size, PAGE, 0)]
    return size_cuda_pool(trial, groups, config(page_size=page_size, num_pages=None), records_prompts)


@pytest.mark.parametrize("page_size", [1, 64])
def test_measuring(monkeypatch, page_size):
    """Each step by itself: graphs keep what the recorded one takes, not what edits of logits do. What the trials'
    short contexts do not show is counted: page tables."""
    cuda = FakeCuda(total=100 * GIB, others=GIB, weights=16 * GIB)
    monkeypatch.setattr(memory.torch, "cuda", cuda.face())
    pages = measured(cuda, recorded=GIB, decode=4 * GIB, prefill=3 * GIB, page_size=page_size)
    graphs = graph_reserve_bytes((1, 2), 1000, GIB) + prefill_reserve_bytes((16, 64), 1000, 3 * GIB, 512)
    max_pages = table_width(MAX_MODEL_LEN, page_size)
    tables = graph_input_bytes((1, 2), (16, 64), 1, max_pages) + eager_table_bytes(1, MAX_NUM_SEQS, max_pages)
    assert (tables > PAGE) == (page_size == 1)
    assert pages == (90 * GIB - 2 * GIB - 16 * GIB - 4 * GIB - SLACK_BYTES - graphs - tables) // PAGE - 1


def test_nothing_is_kept_for_graphs_that_cannot_be(monkeypatch):
    """Regression: memory was reserved for graphs that an adapter cannot have."""
    cuda = FakeCuda(total=100 * GIB, others=GIB, weights=16 * GIB)
    monkeypatch.setattr(memory.torch, "cuda", cuda.face())
    pages = measured(cuda, recorded=None, decode=4 * GIB, prefill=3 * GIB, records_prompts=False)
    tables = eager_table_bytes(1, MAX_NUM_SEQS, table_width(MAX_MODEL_LEN, 64))
    assert pages == (90 * GIB - 2 * GIB - 16 * GIB - 4 * GIB - SLACK_BYTES - tables) // PAGE - 1


def test_a_step_that_runs_out_of_memory(monkeypatch):
    cuda = FakeCuda(total=20 * GIB, others=GIB, weights=16 * GIB)
    monkeypatch.setattr(memory.torch, "cuda", cuda.face())
    with pytest.raises(ConfigError) as raised:
        measured(cuda, recorded=GIB, decode=2 * GIB, prefill=30 * GIB)
    message = str(raised.value)
    for part in ("the largest step", "at least 3", "of 20.00 GiB free", "--chunked-prefill-size", "--quantization fp8"):
        assert part in message, message
