"""Compiles the kernels that a model needs in worker processes, while the engine loads its weights.

The engine builds a twin of the model with few layers of random weights, one of each kind at least, and goes through the
steps that stand for all (`warm_up`) without launching anything. Every launch of the real model has its like there,
whatever the family, the quantization or the kernel. Each variant that is met becomes an order for the workers, which
know nothing of models and need no GPU (`compile_worker`). What they leave behind is Triton's cache on disk, keyed by
source, versions and GPU; the engine loads it from there. A worker that fails costs time, not correctness: the engine
then compiles by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import tokenspeed.kernels.triton
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.cpu.native.build import cache_folders
from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.runner import warm_up
from tokenspeed.runner.compile_worker import END, POLL_S, Compiled, Target, encoded, hash_compiler, publish, result
from tokenspeed.runner.warm_up import EXPERT_TOKENS, plan_pages, representatives, warm_up_plans

CACHE_VARIABLE = "TRITON_CACHE_DIR"
MAX_WORKERS = 16
WORKER_TIMEOUT_S = 600.0
WARP_SIZE = 32
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


def _leave(_: KernelOrder) -> None:
    """The kernel is loaded when it is first used."""


class CompileJob:
    """Workers that compile what is ordered. Leaving its `with` block ends those that still run.

    Args:
        workers: the process of them all; None when there is nothing to do.
        folder: of their orders, claims, results and log, removed at the end.
        marker: written when all succeeded.
        about: a line for the log when there is nothing to do.
    """

    def __init__(
        self, workers: subprocess.Popen[bytes] | None, folder: Path | None, marker: Path | None, about: str
    ) -> None:
        self._workers = workers
        self._folder = folder
        self._marker = marker
        self._about = about
        self._started_s = time.time()
        self._hashing = threading.Thread(target=_hash_compiler, name="hash-compiler", daemon=True)
        self._hashing.start()
        self._orders: dict[str, KernelOrder] = {}
        self._results: dict[str, Compiled] = {}

    def __enter__(self) -> CompileJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def takes_orders(self) -> bool:
        """Somebody compiles."""
        return self._workers is not None

    def order(self, order: KernelOrder) -> None:
        """Have a kernel compiled."""
        assert self._folder is not None
        name = f"{order.size:06d}-{len(self._orders):04d}"
        self._orders[name] = order
        publish(self._folder / "orders" / name, encoded(order))

    def wait(self, load: Callable[[KernelOrder], object] = _leave) -> str:
        """Until all that was ordered is done; returns a line for the log.

        Args:
            load: called for each kernel as soon as it is compiled.
        """
        self._hashing.join()  # the first kernel that is loaded needs it
        if self._workers is None or self._folder is None:
            return self._about
        (self._folder / END).touch()
        deadline_s = self._started_s + WORKER_TIMEOUT_S
        problem = ""
        try:
            while (code := self._workers.poll()) is None and time.time() < deadline_s:
                if not self._take_results(load):
                    time.sleep(POLL_S)
            self._take_results(load)
            if code != 0:
                reason = f"took more than {WORKER_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
                problem = f"kernel compile workers {reason}: {self._last_words()}"
        finally:
            self.stop()
        return self._said(problem)

    def stop(self) -> None:
        """End the workers that still run and remove their folder. Safe to call again."""
        if self._workers is not None and self._workers.poll() is None:
            self._workers.kill()  # the forked ones die with it
            self._workers.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _take_results(self, load: Callable[[KernelOrder], object]) -> int:
        """Of kernels that were compiled since the last call; how many."""
        assert self._folder is not None
        new = sorted(set(os.listdir(self._folder / "done")) - set(self._results))
        for name in new:
            done = self._results[name] = result(self._folder / "done" / name)
            logger.debug(
                "kernel %s: worker %d began at %.2f s, compiled for %.2f s, its launcher for %.2f s",
                done.name, done.worker, done.began_s - self._started_s, done.compile_s, done.launcher_s,
            )  # fmt: skip
            if done.error is None:
                self._load(self._orders[name], load)
        return len(new)

    def _load(self, order: KernelOrder, load: Callable[[KernelOrder], object]) -> None:
        try:
            load(order)
        except Exception as error:  # the launch that needs it will raise it again
            logger.warning("%s was not loaded ahead: %s: %s", order.name, type(error).__name__, error)

    def _said(self, problem: str) -> str:
        seconds = time.time() - self._started_s
        results = list(self._results.values())
        errors = [done.error for done in results if done.error is not None]
        num_left = len(self._orders) - len(results) + len(errors)
        if problem or num_left:
            logger.warning("%s", problem or f"kernel compile workers: {errors[0] if errors else 'they left some'}")
        elif self._marker is not None:
            self._marker.touch()
        rest = f"; {num_left} failed, the rest is compiled when first used" if num_left else ""
        work_s = sum(done.compile_s + done.launcher_s for done in results)
        longest = max(results, key=lambda done: done.compile_s, default=None)
        most = f", {longest.name} the longest with {longest.compile_s:.1f} s" if longest is not None else ""
        return (
            f"kernels: {len(results)} compiled by {len({done.worker for done in results})} processes in {seconds:.1f} "
            f"s (work of {work_s:.1f} s{most}){rest}"
        )

    def _last_words(self) -> str:
        assert self._folder is not None
        try:
            lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "they said nothing"


def _hash_compiler() -> None:
    """Beside the load: most of it is done without Python's lock."""
    with contextlib.suppress(ImportError):
        hash_compiler()


def start_compile(config: EngineConfig) -> CompileJob:
    """Set Triton's cache folder and start the workers. Call before the first kernel is launched.

    Where everything was compiled before, there is nothing to do.
    """
    folder = prepare_cache()
    if folder is None:
        return CompileJob(None, None, None, "kernels: compiled when first used, no cache folder can be written")
    marker = folder / f"warm-{_key(config)}"
    if marker.exists():
        return CompileJob(None, None, None, f"kernels: compiled before, in {folder}")
    major, minor = torch.cuda.get_device_capability()
    work = work_folder(Target("cuda", 10 * major + minor, WARP_SIZE))
    return CompileJob(start_workers(work, num_workers(config)), work, marker, "")


def work_folder(target: Target) -> Path:
    """What workers share with who orders, empty; see `compile_worker`."""
    work = Path(tempfile.mkdtemp(prefix="tokenspeed-compile-"))
    for name in ("orders", "claims", "done"):
        (work / name).mkdir()
    (work / "target").write_bytes(msgspec.json.encode(target))
    return work


def start_workers(work: Path, count: int) -> subprocess.Popen[bytes]:
    """`count` processes, of which one is ours to wait for."""
    command = [sys.executable, "-m", "tokenspeed.runner.compile_worker", str(work), str(count)]
    with open(work / "log", "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


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


def num_workers(config: EngineConfig) -> int:
    """One a core."""
    return max(1, min(config.num_threads, MAX_WORKERS))


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
