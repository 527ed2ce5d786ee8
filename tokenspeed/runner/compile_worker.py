"""Processes that fill Triton's cache.

One (`compile_process`) imports Triton and the kernels, and forks the others, which share its memory. None of them
touches the GPU. They take orders from the folder (`compile_folder`), the longest first, until there will be no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import pkgutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

import tokenspeed.kernels.triton
from tokenspeed.kernels.triton.compile_monitor import KernelOrder, load_kernel
from tokenspeed.runner.compile_folder import END, POLL_S, Compiled, Target, names, publish, target
from tokenspeed.runner.compile_process import die_with_parent

HAS_LAUNCHERS = hasattr(nvidia, "make_launcher")
"""Up to 3.6 Triton launches kernels through a C module for each signature, which it compiles as well."""


def compile_all(folder: Path, count: int) -> int:
    """Make ready, wait for the target, have `count` forks work; returns 0 when none failed."""
    _prepare()
    compiles_for = _target(folder)
    if compiles_for is None:
        return 0
    triton.runtime.driver.set_active(_absent_gpu(compiles_for))
    return _fork(folder, count)


def _fork(folder: Path, count: int) -> int:
    own = os.getpid()
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            os._exit(_forked(folder, index, own))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return int(any(codes))


def _prepare() -> None:
    """What every kernel needs, all at once: the kernels' modules with torch, Triton's hash of itself, and the C module
    that it drives a GPU with, for the engine."""
    tasks = [threading.Thread(target=task) for task in (hash_compiler, _build_driver)]
    for task in tasks:
        task.start()
    for module in pkgutil.iter_modules(tokenspeed.kernels.triton.__path__, "tokenspeed.kernels.triton."):
        with contextlib.suppress(ImportError):  # a part of Triton that this version lacks: no order will need it
            importlib.import_module(module.name)
    for task in tasks:
        task.join()  # no thread may hold a lock when this process forks


def _target(folder: Path) -> Target | None:
    """As soon as the engine knows it; None when it has ended without."""
    while (found := target(folder)) is None:
        if (folder / END).exists() or not folder.exists():
            return None
        time.sleep(POLL_S)
    return found


def work(folder: Path, worker: int) -> int:
    """Compile orders until there will be no more; returns how many failed."""
    num_failed = 0
    for path in _orders(folder):
        order = msgspec.msgpack.decode(path.read_bytes(), type=KernelOrder)
        began_s, compile_s, launcher_s, error, launcher = time.time(), 0.0, 0.0, None, None
        try:
            kernel = load_kernel(order)
            compile_s = time.time() - began_s
            if HAS_LAUNCHERS:
                launcher = _launcher_name(kernel)
                if _claim(folder, launcher):
                    _build_launcher(kernel, folder / "launchers" / launcher)
                    launcher_s = time.time() - began_s - compile_s
        except Exception as failure:
            traceback.print_exc()
            error = f"{order.name}: {type(failure).__name__}: {str(failure)[:200]}"
            num_failed += 1
        done = Compiled(order.name, worker, began_s, compile_s, launcher_s, error, launcher)
        publish(folder / "done" / path.name, done)
    return num_failed


def _orders(folder: Path) -> Iterator[Path]:
    """Each order that this process has claimed, longest first among those there; ends when there will be no more."""
    known: set[str] = set()
    while True:
        is_complete = (folder / END).exists()  # asked before the list is read
        for name in sorted(names(folder / "orders") - known, reverse=True):
            known.add(name)
            if _claim(folder, name):
                yield folder / "orders" / name
                break
        else:
            if is_complete:
                return
            time.sleep(POLL_S)


def _claim(folder: Path, name: str) -> bool:
    try:
        os.close(os.open(folder / "claims" / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _forked(folder: Path, index: int, parent: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        die_with_parent(signal.SIGKILL)
        return int(os.getppid() != parent or work(folder, index) > 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _absent_gpu(compiles_for: Target) -> Any:
    """As much of a driver as the compiler asks for: no CUDA context is made, which takes memory and half a second."""
    gpu = GPUTarget(compiles_for.backend, compiles_for.arch, compiles_for.warp_size)
    return SimpleNamespace(
        get_current_device=lambda: 0, get_current_target=lambda: gpu, launcher_cls=nvidia.CudaLauncher
    )


def hash_compiler() -> None:
    """Triton's cache keys hold a hash of its own files, some 400 MB, which it reads once a process."""
    with contextlib.suppress(ImportError):  # not in every version; then the first kernel has it read
        from triton.runtime.cache import triton_key

        triton_key()


def _build_driver() -> None:
    """Half a second of the C compiler. It needs the GPU's library, but no GPU; where there is none, so be it."""
    if HAS_LAUNCHERS:
        with contextlib.suppress(Exception):
            nvidia.CudaUtils()


def _launcher_name(kernel: Any) -> str:
    """One for all kernels that are launched by the same C module."""
    shape = (list(kernel.src.signature.values()), getattr(kernel.metadata, "tensordesc_meta", None))
    return "launcher-" + hashlib.sha256(repr(shape).encode()).hexdigest()


def _build_launcher(kernel: Any, built: Path) -> None:
    """What Triton otherwise does when a kernel is first loaded, 0.2 s each. `built` appears, whether it could or not:
    others wait for it."""
    try:
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    finally:
        built.touch()
