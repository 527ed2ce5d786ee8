"""Starts compile workers before anything is known but the configuration. No torch, no Triton: the workers take as long
to import these as the engine does, so they begin at the same moment.

Owns where kernels are kept, the mark of a cache that has all, and the configuration that stands for the engine's while
kernels are listed (`twin`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import tokenspeed.kernels.triton
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.cpu.native.build import cache_folders
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner import warm_up
from tokenspeed.runner.compile_folder import remove, work_folder
from tokenspeed.runner.warm_up import EXPERT_TOKENS, plan_pages, representatives, warm_up_plans

CACHE_VARIABLE = "TRITON_CACHE_DIR"
MAX_WORKERS = 16
PROBE_BYTES = 2**20
TWIN_BATCH_TOKENS = 1024

DECIDING_FIELDS = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "quantize_on_load",
    "page_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "capture_sizes",
    "prefill_sizes",
    "attention_backend",
    "moe_backend",
)
"""Of `EngineConfig`, besides the model's shape: what a kernel is compiled for, and which steps stand for all. The
context's length is one: strides depend on it, and how many requests a large step has."""
TEXT_FIELDS = ("bos_token_id", "eos_token_ids", "sampling_defaults")
"""Of `ModelConfig`: what no kernel sees."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that compile what is ordered in a folder.

    Fields:
        process: of them all; the others are its children and end with it.
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def stop(self) -> None:
        """End those that still run and remove the folder. Safe to call again."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        remove(self.folder)


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Where this configuration's kernels are kept.

    Fields:
        key: of everything but the GPU that decides which variants exist and what they compile to.
    """

    folder: Path
    key: str

    def marker(self, gpu: str) -> Path:
        """There when all kernels for `gpu` are. A wrong hit costs time, not truth."""
        return self.folder / f"warm-{self.key}-{hashlib.sha256(gpu.encode()).hexdigest()[:8]}"

    def has_all(self, gpu: str | None) -> bool:
        """Kernels for `gpu`; None = for some GPU."""
        return any(self.folder.glob(f"warm-{self.key}-*")) if gpu is None else self.marker(gpu).exists()


def start_early(config: EngineConfig) -> Workers | None:
    """Workers, if there is something for them to do as far as can be told before the GPU is asked.

    Raises:
        ConfigError: see `prepare_cache`.
    """
    if config.device != "cuda":
        return None
    return None if prepare_cache(config).has_all(None) else start_workers(num_workers(config))


def start_workers(count: int) -> Workers | None:
    """`count` processes. None when none can be had, which costs time only."""
    try:
        folder = work_folder()
        try:
            return Workers(_start(folder, count), folder)
        except BaseException:
            remove(folder)  # which ends a process that was started
            raise
    except OSError as error:
        logger.warning("kernels are compiled one by one, no worker could be started: %s", error)
        return None


def _start(folder: Path, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tokenspeed.runner.compile_process", str(folder), str(count), str(os.getpid())]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def prepare_cache(config: EngineConfig, gpu: str | None = None) -> KernelCache:
    """Point Triton at our cache folder, unless the user has chosen one.

    Args:
        gpu: see `KernelCache.has_all`. A folder that has all need not be writable.
    Raises:
        ConfigError: no folder can be had. Triton cannot compile then: it reads what it has compiled from files.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    candidates = [Path(chosen)] if chosen else [folder / "triton" for folder in cache_folders()]
    key = _key(config)
    problems = []
    for folder in candidates:
        cache = KernelCache(folder, key)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
            # Kernels from a folder that others can write to would be their code in our process.
            if not chosen and (status.st_uid != os.getuid() or status.st_mode & 0o002):
                raise PermissionError("it belongs to another user, or others may write to it")
            if not cache.has_all(gpu):
                _write(folder)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        os.environ[CACHE_VARIABLE] = str(folder)
        return cache
    remedy = f"set {CACHE_VARIABLE if chosen else 'TOKENSPEED_CACHE'} to a folder of yours with room"
    raise ConfigError(f"no folder for compiled GPU kernels can be written ({'; '.join(problems)}); {remedy}")


def _write(folder: Path) -> None:
    """As much as a kernel takes. Permission alone says nothing of a full disk."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if file.write(bytes(PROBE_BYTES)) < PROBE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def num_workers(config: EngineConfig) -> int:
    """One a core."""
    return max(1, min(config.num_threads, MAX_WORKERS))


def twin(config: EngineConfig) -> EngineConfig:
    """The same engine with few layers (`twin_model`), random weights and a pool of one sequence."""
    has_experts = config.model.moe is not None
    batch_tokens = min(config.max_num_batched_tokens, max(EXPERT_TOKENS) if has_experts else TWIN_BATCH_TOKENS)
    plans = warm_up_plans(
        config.max_num_seqs, config.max_model_len, batch_tokens, config.page_size, has_experts=has_experts
    )
    num_pages = max(-(-config.max_model_len // config.page_size), plan_pages(plans))
    return msgspec.structs.replace(
        config,
        model=twin_model(config.model),
        checkpoint=msgspec.structs.replace(config.checkpoint, format="config", weight_files=()),
        load_format="dummy",
        max_num_batched_tokens=batch_tokens,
        num_pages=num_pages,
        kv_memory_bytes=None,
        gpu_memory_utilization=1.0,
        capture_sizes=representatives(config.capture_sizes),
        prefill_sizes=representatives(config.prefill_sizes),
        grammar_backend="none",
        seed=0,
        choices=(),
    )


def twin_model(model: ModelConfig) -> ModelConfig:
    """A layer of each kind, and one with experts that is not the last: of a prompt, the last layer computes only the
    tokens that are asked for once all have attended, so its experts never meet many."""
    count = num_kinds_prefix(model)
    if model.moe is not None and not any(_has_experts(model, layer) for layer in range(count - 1)):
        count = min(model.num_layers, count + 1)
    return _first_layers(model, count)


def num_kinds_prefix(model: ModelConfig) -> int:
    """Layers at the model's beginning among which every kind of layer occurs: its window, experts or a dense MLP."""
    last_of_kind: dict[tuple[int | None, bool], int] = {}
    for layer in range(model.num_layers):
        window = model.layer_windows[layer] if model.layer_windows else None
        last_of_kind.setdefault((window, _has_experts(model, layer)), layer)
    return 1 + max(last_of_kind.values())


def _has_experts(model: ModelConfig, layer: int) -> bool:
    return model.moe is not None and layer not in model.moe.dense_layers


def _first_layers(model: ModelConfig, count: int) -> ModelConfig:
    moe = model.moe
    if moe is not None:
        dense = tuple(layer for layer in moe.dense_layers if layer < count)
        moe = msgspec.structs.replace(moe, dense_layers=dense)
    return msgspec.structs.replace(model, num_layers=count, layer_windows=model.layer_windows[:count], moe=moe)


def _key(config: EngineConfig) -> str:
    """See `KernelCache`."""
    order = twin(config)
    deciding = [msgspec.to_builtins(getattr(order, name)) for name in DECIDING_FIELDS]
    digest = hashlib.sha256(msgspec.json.encode([_shape(order.model), *deciding]))
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # Triton has other names for other GPUs
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    for path in _deciding_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _shape(model: ModelConfig) -> dict[str, Any]:
    """A model without what only the scheduler, the tokenizer and the defaults of requests read."""
    return {name: value for name, value in msgspec.to_builtins(model).items() if name not in TEXT_FIELDS}


def _deciding_files() -> list[Path]:
    """The kernels, the tables that choose their tiles, and the choice of steps that stand for all."""
    kernels = [Path(folder) for folder in tokenspeed.kernels.triton.__path__]
    found = [path for folder in kernels for kind in ("**/*.py", "tables/*.json") for path in sorted(folder.glob(kind))]
    return [*found, Path(warm_up.__file__)]
