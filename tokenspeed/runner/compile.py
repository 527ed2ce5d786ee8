"""Compiles the kernels that a model needs in worker processes, while the engine loads its weights.

A worker builds a twin of the model with few layers of random weights, one of each kind at least, and runs the steps
that stand for all (`warm_up`). Every launch of the real model has its like there, whatever the family, the quantization
or the kernel, so nothing has to be listed. Workers run the same launches and claim the kernels that are missing, one by
one. What is left behind is Triton's cache on disk, keyed by source, versions and GPU; the engine finds it there. A
worker that fails costs time, not correctness: the engine then compiles by itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import tokenspeed.kernels.triton
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.cpu.native.build import cache_folders
from tokenspeed.runner import warm_up
from tokenspeed.runner.warm_up import EXPERT_TOKENS, plan_pages, representatives, warm_up_plans

CACHE_VARIABLE = "TRITON_CACHE_DIR"
WORKER_VARIABLE = "TOKENSPEED_COMPILE_WORKER"
"""Set by this module for its own workers: the folder of their claims."""

MAX_WORKERS = 16
MEMORY_SHARE = 0.5
"""Of what the engine's own weights will leave of the GPU's free memory, for all workers together."""
CONTEXT_BYTES = 3 * 2**29
"""CUDA context, kernels, workspaces and activations of a worker."""
WORKER_TIMEOUT_S = 600.0
TWIN_BATCH_TOKENS = 1024
MXFP4_BYTES = 17 / 32
"""Of a weight: 4 bits, and a byte of scale for 32 of them."""

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


class CompileJob:
    """Workers that compile; `wait` for them before memory is measured, because they use the same GPU. Leaving its
    `with` block ends those that still run.

    Args:
        folder: of their order and logs, removed at the end; None when there is nothing to do.
        marker: written when all succeeded.
    """

    def __init__(
        self, workers: Sequence[subprocess.Popen[bytes]], folder: Path | None, marker: Path | None, about: str
    ) -> None:
        self._workers = workers
        self._folder = folder
        self._marker = marker
        self._about = about
        self._started_s = time.monotonic()

    def __enter__(self) -> CompileJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait(self) -> str:
        """Until every worker has ended; returns a line for the log."""
        if not self._workers:
            return self._about
        deadline_s = self._started_s + WORKER_TIMEOUT_S
        failed = 0
        try:
            for index, worker in enumerate(self._workers):
                try:
                    code = worker.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
                if code != 0:
                    failed += 1
                    reason = f"took more than {WORKER_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
                    logger.warning("kernel compile worker %d %s: %s", index, reason, self._last_words(index))
        finally:
            self.stop()
        seconds = time.monotonic() - self._started_s
        if failed == 0 and self._marker is not None:
            self._marker.touch()
        rest = f"; {failed} failed, the rest is compiled when first used" if failed else ""
        return f"kernels: compiled by {len(self._workers)} processes in {seconds:.1f} s{rest}"

    def stop(self) -> None:
        """End the workers that still run and remove their folder. Safe to call again."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _last_words(self, index: int) -> str:
        assert self._folder is not None
        try:
            lines = (self._folder / f"{index}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"


def start_compile(config: EngineConfig) -> CompileJob:
    """Set Triton's cache folder and start the workers. Call before the first kernel is launched.

    In a worker itself, and where everything was compiled before, there is nothing to do.
    """
    if is_worker():
        return CompileJob((), None, None, "kernels: compiled here, a worker")
    folder = prepare_cache()
    if folder is None:
        return CompileJob((), None, None, "kernels: compiled when first used, no cache folder can be written")
    marker = folder / f"warm-{_key(config)}"
    if marker.exists():
        return CompileJob((), None, None, f"kernels: compiled before, in {folder}")
    count = num_workers(config, torch.cuda.mem_get_info()[0])
    work = Path(tempfile.mkdtemp(prefix="tokenspeed-compile-"))
    (work / "order").write_bytes(msgspec.msgpack.encode(twin(config)))
    (work / "claims").mkdir()
    return CompileJob([_start_worker(work, index) for index in range(count)], work, marker, "")


def prepare_cache() -> Path | None:
    """Point Triton at our cache folder, unless the user has chosen one; None when none can be written."""
    chosen = os.environ.get(CACHE_VARIABLE)
    candidates = [Path(chosen)] if chosen else [folder / "triton" for folder in cache_folders()]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except OSError:
            continue
        # Kernels from a folder that others can write to would be their code in our process.
        if os.access(folder, os.W_OK) and (chosen or (status.st_uid == os.getuid() and not status.st_mode & 0o002)):
            os.environ[CACHE_VARIABLE] = str(folder)
            return folder
    return None


def twin(config: EngineConfig) -> EngineConfig:
    """The same engine with a layer of each kind, random weights and a pool of one sequence."""
    has_experts = config.model.moe is not None
    batch_tokens = min(config.max_num_batched_tokens, max(EXPERT_TOKENS) if has_experts else TWIN_BATCH_TOKENS)
    plans = warm_up_plans(
        config.max_num_seqs, config.max_model_len, batch_tokens, config.page_size, has_experts=has_experts
    )
    num_pages = max(-(-config.max_model_len // config.page_size), plan_pages(plans))
    return msgspec.structs.replace(
        config,
        model=_first_layers(config.model, num_kinds_prefix(config.model)),
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


def is_worker() -> bool:
    """True in a process that only compiles; it need not measure memory."""
    return claims_folder() is not None


def claims_folder() -> Path | None:
    """Of this worker, or None in an engine."""
    folder = os.environ.get(WORKER_VARIABLE)
    return Path(folder) if folder else None


def num_workers(config: EngineConfig, free_bytes: int) -> int:
    """One a core, as far as there is memory for them."""
    each = CONTEXT_BYTES + _weight_bytes(config, num_kinds_prefix(config.model))
    left = free_bytes - _weight_bytes(config, config.model.num_layers)
    return max(1, min(config.num_threads, MAX_WORKERS, int(left * MEMORY_SHARE) // each))


def _weight_bytes(config: EngineConfig, num_layers: int) -> int:
    """What the first layers and both ends of the model take, about: in the engine's dtype, but for MXFP4 experts."""
    model, moe = config.model, config.model.moe
    item_bytes = 4 if config.dtype == "float32" else 2
    with_experts = sum(_has_experts(model, layer) for layer in range(num_layers))
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    dense = num_layers * attention + (num_layers - with_experts) * 3 * model.intermediate_size
    ends = model.vocab_size * (1 if model.tie_word_embeddings else 2)
    total = float(item_bytes * (dense + ends))
    if moe is not None:
        is_mxfp4 = model.quantization is not None and model.quantization.method == "mxfp4"
        expert_item_bytes = MXFP4_BYTES if is_mxfp4 else item_bytes
        total += expert_item_bytes * with_experts * moe.num_experts * 3 * moe.intermediate_size
    return int(total * model.hidden_size)


def _start_worker(work: Path, index: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, WORKER_VARIABLE: str(work / "claims")}
    command = [sys.executable, "-m", "tokenspeed.runner.compile_worker", str(work / "order")]
    with open(work / f"{index}.log", "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _key(config: EngineConfig) -> str:
    """Of everything that decides which variants exist and what they compile to; a wrong hit costs time, not truth."""
    order = twin(config)
    deciding = [msgspec.to_builtins(getattr(order, name)) for name in DECIDING_FIELDS]
    digest = hashlib.sha256(msgspec.json.encode([_shape(order.model), *deciding]))
    for package in ("torch", "triton"):
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    digest.update(f"{torch.version.cuda} {torch.cuda.get_device_name()}".encode())
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
