"""What is said when a GPU's memory runs out: which errors count, and each stage's bytes and flags."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from runner_support import engine_config, tiny_model

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.memory_errors import DOING, MemoryErrors, is_out_of_memory, remedies, tried_bytes
from tokenspeed.runner.weight_room import WeightRoom

GIB = 2**30
TRIED = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB"
CONFIG = engine_config(tiny_model("LlamaForCausalLM"), device="cuda", gpu_memory_utilization=0.9, capture_sizes=(1, 2))


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(TRIED)


def device(total: int = 80 * GIB, free: int = GIB, reserved: int = 70 * GIB) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        mem_get_info=lambda: (free, total), memory_reserved=lambda: reserved, empty_cache=lambda: None
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", device())


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.OutOfMemoryError(TRIED), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (ConfigError("the engine is out of memory"), False),
    ],
)
def test_which_errors_count(error: Exception, counts: bool) -> None:
    assert is_out_of_memory(error) == counts


def test_an_error_that_hides_another_counts() -> None:
    """A capture that is broken off ends with an error of its own."""
    try:
        try:
            full()
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_out_of_memory(error)
        assert tried_bytes(error) == int(2.5 * GIB)


def test_errors_in_a_circle_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    assert tried_bytes(first) == 0


@pytest.mark.parametrize(("text", "nbytes"), [("2.00 GiB", 2 * GIB), ("20.00 MiB", 20 * 2**20), ("512 bytes", 512)])
def test_what_was_tried(text: str, nbytes: int) -> None:
    assert tried_bytes(torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {text}. GPU 0")) == nbytes


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        ("load", ["--quantization fp8"]),
        ("trial", ["--quantization fp8", "--chunked-prefill-size", "--max-num-seqs"]),
        ("pool", ["--max-total-tokens"]),
        ("capture", ["--max-cudagraph-capture-size", "--prefill-graph-max-tokens", "--enforce-eager"]),
    ],
)
def test_every_stage_of_the_start_names_bytes_and_flags(stage: Any, flags: list[str], gpu: None) -> None:
    with pytest.raises(ConfigError) as raised, MemoryErrors(CONFIG).during(stage, lambda: 7 * GIB):
        full()
    for part in (DOING[stage], "at least 7.00 GiB needed", "1.00 GiB of 80.00 GiB free", "70.00 GiB held", *flags):
        assert part in str(raised.value), str(raised.value)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_what_was_taken_and_tried_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [10 * GIB]
    monkeypatch.setattr(torch, "cuda", device())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held[0])
    with pytest.raises(ConfigError, match=r"at least 6\.50 GiB needed"), MemoryErrors().during("load"):
        held[0] += 4 * GIB
        full()


def test_other_errors_pass(gpu: None) -> None:
    with pytest.raises(ZeroDivisionError), MemoryErrors(CONFIG).during("load"):
        raise ZeroDivisionError
    broken = RuntimeError("an illegal memory access")
    assert MemoryErrors(CONFIG).of_step(broken) is broken


def test_the_pool_is_made_smaller_by_the_flag_that_made_it(gpu: None) -> None:
    by_bytes = msgspec.structs.replace(CONFIG, num_pages=None, kv_memory_bytes=GIB)
    by_share = msgspec.structs.replace(CONFIG, num_pages=None)
    for config, flag in ((CONFIG, "--max-total"), (by_bytes, "--kv-cache-memory-gb"), (by_share, "--gpu-memory-util")):
        assert any(flag in remedy for remedy in remedies("pool", config))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"dtype": "float32"}, "--dtype bfloat16"),
        ({"quantize_on_load": "fp8"}, None),
        ({"has_e4m3": False}, None),
        ({"dtype": "float16"}, None),
        ({"model": msgspec.structs.replace(CONFIG.model, qtype="Q4_1")}, None),
    ],
)
def test_weights_that_cannot_be_lighter(changes: dict[str, Any], flag: str | None) -> None:
    named = " ".join(remedies("load", msgspec.structs.replace(CONFIG, **changes)))
    assert "--quantization" not in named
    assert flag is None or flag in named


@pytest.mark.parametrize(("dtype", "is_wide"), [("bfloat16", False), ("float32", True)])
def test_a_kernel_that_does_not_fit_the_gpu(dtype: Any, is_wide: bool, gpu: None) -> None:
    """Triton's own words tell of block sizes, which no user sets."""
    errors = pytest.importorskip("triton.runtime.errors")
    with (
        pytest.raises(ConfigError) as raised,
        MemoryErrors(msgspec.structs.replace(CONFIG, dtype=dtype)).during("trial"),
    ):
        raise RuntimeError("a step failed") from errors.OutOfResources(147712, 101376, "shared memory")
    for part in ("largest step", "shared memory of 147712", "101376", "--attention-backend", "--device cpu"):
        assert part in str(raised.value), str(raised.value)
    assert ("--dtype bfloat16" in str(raised.value)) == is_wide


# ---- where it happens in a start -------------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, gpu: None) -> Callable[..., str]:
    """A start on a made-up GPU with some of its parts replaced; the error's text."""
    build_cuda = pytest.importorskip("tokenspeed.runner.build_cuda")
    monitor = types.SimpleNamespace(install=lambda: None, totals=lambda: (0, 0.0), num_met=0, serving=lambda: None)
    job = types.SimpleNamespace(takes_orders=False, has_loaded_all=False, wait=lambda *_: "")
    model = types.SimpleNamespace(cache_specs=list)
    loaded = types.SimpleNamespace(
        model=model, ops=types.SimpleNamespace(recorder=None), backend=types.SimpleNamespace(can_record=True)
    )
    group = GroupSpec("full", "full", 64, GIB, 5)
    given = {
        "CompileMonitor": lambda _: monitor,
        "count_compiles": lambda _: None,
        "build_compiler": lambda _: (None, ""),
        "start_compile": lambda *_: contextlib.nullcontext(job),
        "load": lambda *_: loaded,
        "group_layers": lambda *_: [group],
        "_size": lambda *_: [group],
        "bind_pool": lambda *_: None,
    }

    def run(**parts: Any) -> str:
        for name, part in {**given, **parts}.items():
            if part is not None:
                monkeypatch.setattr(build_cuda, name, part)
        with pytest.raises(ConfigError) as raised:
            build_cuda.build_cuda_runner(CONFIG)
        return str(raised.value)

    return run


def test_a_load_without_memory(start: Callable[..., str]) -> None:
    def load(_: Any, room: WeightRoom) -> Any:
        room.kept = 40 * GIB
        full()

    message = start(load=load)
    assert "loading the weights: at least 40.00 GiB needed" in message and "--quantization fp8" in message


def test_a_trial_without_memory(start: Callable[..., str]) -> None:
    message = start(_size=None, bind_pool=full)
    assert "the largest step" in message and "--chunked-prefill-size" in message


def test_a_pool_without_memory(start: Callable[..., str]) -> None:
    message = start(bind_pool=full)
    assert "the KV pool: at least 6.00 GiB needed" in message and "--max-total-tokens" in message
