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
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tokenspeed.config.engine import EngineConfig
from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.runner.compile_folder import END, POLL_S, TARGET, Compiled, Target, names, publish, result
from tokenspeed.runner.compile_start import Workers, num_workers, prepare_cache, start_early, start_workers
from tokenspeed.runner.compile_worker import hash_compiler

WORKER_TIMEOUT_S = 600.0
WARP_SIZE = 32

logger = logging.getLogger(__name__)


def _leave(_: KernelOrder) -> None:
    """The kernel is loaded when it is first used."""


class CompileJob:
    """Workers that compile what is ordered. Leaving its `with` block ends those that still run.

    Args:
        workers: None when there is nothing to do.
        marker: written when all that a complete list had was compiled.
        about: a line for the log when there is nothing to do.
    """

    def __init__(self, workers: Workers | None, marker: Path | None, about: str = "") -> None:
        self._workers = workers
        self._marker = marker
        self._about = about
        self._started_s = time.time()
        self._hashing = threading.Thread(target=hash_compiler, name="hash-compiler", daemon=True)
        self._hashing.start()
        self._orders: dict[str, KernelOrder] = {}
        self._results: dict[str, Compiled] = {}
        self._unloaded: list[str] = []
        self._num_loaded = 0

    def __enter__(self) -> CompileJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def takes_orders(self) -> bool:
        """Somebody compiles."""
        return self._workers is not None

    @property
    def has_loaded_all(self) -> bool:
        """Something was ordered, and all of it is compiled and loaded."""
        return bool(self._orders) and self._num_loaded == len(self._orders)

    def order(self, order: KernelOrder) -> None:
        """Have a kernel compiled."""
        assert self._workers is not None
        name = f"{order.size:06d}-{len(self._orders):04d}"
        self._orders[name] = order
        publish(self._workers.folder / "orders" / name, order)

    def wait(self, is_listed: bool, load: Callable[[KernelOrder], object] = _leave) -> str:
        """Until all that was ordered is done; returns a line for the log.

        Args:
            is_listed: what was ordered is all that the model needs. Only then is the cache marked as complete.
            load: called for each kernel as soon as it is compiled.
        """
        self._hashing.join()  # the first kernel that is loaded needs it
        if self._workers is None:
            return self._about
        process, folder = self._workers.process, self._workers.folder
        deadline_s = self._started_s + WORKER_TIMEOUT_S
        problem = ""
        try:
            (folder / END).touch()
            while (code := process.poll()) is None and time.time() < deadline_s:
                if not self._take_results(folder, load):
                    time.sleep(POLL_S)
            self._take_results(folder, load, is_last=True)
            if code != 0:
                reason = f"took more than {WORKER_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
                problem = f"kernel compile workers {reason}: {_last_words(folder)}"
        except OSError as error:  # somebody cleans the temporary folder up, or it is full
            problem = f"kernel compile workers: {error}"
        finally:
            self.stop()
        return self._said(problem, is_listed)

    def stop(self) -> None:
        """End the workers that still run and remove their folder. Safe to call again."""
        if self._workers is not None:
            self._workers.stop()

    def _take_results(self, folder: Path, load: Callable[[KernelOrder], object], is_last: bool = False) -> int:
        """Of kernels that were compiled since the last call; how many. One whose launcher somebody still builds is
        loaded later: else Triton would build it here, and all others would wait."""
        new = sorted(names(folder / "done") - set(self._results))
        for name in new:
            done = self._results[name] = result(folder / "done" / name)
            logger.debug(
                "kernel %s: worker %d began at %.2f s, compiled for %.2f s, its launcher for %.2f s",
                done.name, done.worker, done.began_s - self._started_s, done.compile_s, done.launcher_s,
            )  # fmt: skip
        self._unloaded += [name for name in new if self._results[name].error is None]
        launchers = {None, *names(folder / "launchers")}
        ready = [name for name in self._unloaded if is_last or self._results[name].launcher in launchers]
        for name in ready:
            self._load(self._orders[name], load)
        self._unloaded = [name for name in self._unloaded if name not in ready]
        return len(ready)

    def _load(self, order: KernelOrder, load: Callable[[KernelOrder], object]) -> None:
        try:
            load(order)
            self._num_loaded += 1
        except Exception as error:  # the launch that needs it will raise it again
            logger.warning("%s was not loaded ahead: %s: %s", order.name, type(error).__name__, error)

    def _said(self, problem: str, is_listed: bool) -> str:
        seconds = time.time() - self._started_s
        results = list(self._results.values())
        errors = [done.error for done in results if done.error is not None]
        num_left = len(self._orders) - len(results) + len(errors)
        if problem or num_left:
            logger.warning("%s", problem or f"kernel compile workers: {errors[0] if errors else 'they left some'}")
        elif self._marker is not None and is_listed and self._orders:
            with contextlib.suppress(OSError):
                self._marker.touch()
        rest = f"; {num_left} failed, the rest is compiled when first used" if num_left else ""
        work_s = sum(done.compile_s + done.launcher_s for done in results)
        longest = max(results, key=lambda done: done.compile_s, default=None)
        most = f", {longest.name} the longest with {longest.compile_s:.1f} s" if longest is not None else ""
        return (
            f"kernels: {len(results)} compiled by {len({done.worker for done in results})} processes in {seconds:.1f} "
            f"s (work of {work_s:.1f} s{most}){rest}"
        )


def _last_words(folder: Path) -> str:
    try:
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "they said nothing"


def start_compile(config: EngineConfig, early: Workers | None = None) -> CompileJob:
    """Set Triton's cache folder and tell the workers what to compile for. Call before the first kernel is launched.

    Where everything was compiled before, there is nothing to do.

    Args:
        early: workers that were started before, which belong to the job from now on; None = they are started here.
    Raises:
        ConfigError: no cache folder can be written.
    """
    workers = early if early is not None else start_early(config)
    try:
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        major, minor = torch.cuda.get_device_capability()
        cache = prepare_cache(config, gpu)
        if cache.has_all(gpu):
            if workers is not None:  # somebody has filled it meanwhile
                workers.stop()
            return CompileJob(None, None, f"kernels: compiled before, in {cache.folder}")
        if workers is None:  # what is there is another GPU's
            workers = start_workers(num_workers(config))
        if workers is None:
            return CompileJob(None, None, "kernels: compiled when first used, no workers could be started")
        with contextlib.suppress(OSError):  # no room for it: then there is none for orders either
            publish(workers.folder / TARGET, Target("cuda", 10 * major + minor, WARP_SIZE))
        return CompileJob(workers, cache.marker(gpu))
    except BaseException:  # a GPU that does not answer
        if workers is not None:
            workers.stop()
        raise
