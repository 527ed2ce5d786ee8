"""Processes that fill Triton's cache: `python -m tokenspeed.runner.compile_worker FOLDER COUNT`, from `compile.py`.

One process imports Triton and the kernels, and forks the others, which share its memory. None of them touches the GPU.
They take orders from a folder, the longest first, until the file END is there and none is left:

    target         what to compile for
    orders/NAME    a `KernelOrder`; NAME sorts by length of the source
    claims/NAME    empty: somebody has it
    done/NAME      a `Compiled`: how it went
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import pkgutil
import signal
import sys
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

POLL_S = 0.01
END = "end"
HAS_LAUNCHERS = hasattr(nvidia, "make_launcher")
"""Up to 3.6 Triton launches kernels through a C module for each signature, which it compiles as well."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Compiled(msgspec.Struct, frozen=True):
    """A finished order.

    Fields:
        name: of the kernel. error: None = it is in the cache.
        began_s: time since the epoch. compile_s: of the kernel. launcher_s: of the C module that launches it, 0 if
            another order had the same.
    """

    name: str
    worker: int
    began_s: float
    compile_s: float
    launcher_s: float
    error: str | None = None


class Target(msgspec.Struct, frozen=True):
    """A GPU, as Triton names it."""

    backend: str
    arch: int
    warp_size: int


def main() -> int:
    """Fork, compile, wait for the others."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the engine ends its workers
    _die_with_parent()
    target = msgspec.json.decode((folder / "target").read_bytes(), type=Target)
    triton.runtime.driver.set_active(_absent_gpu(GPUTarget(target.backend, target.arch, target.warp_size)))
    for module in pkgutil.iter_modules(tokenspeed.kernels.triton.__path__, "tokenspeed.kernels.triton."):
        with contextlib.suppress(ImportError):  # a part of Triton that this version lacks: no order will need it
            importlib.import_module(module.name)
    with contextlib.suppress(ImportError):
        hash_compiler()
    children = []
    for index in range(1, count):
        child = os.fork()
        if child == 0:
            os._exit(_forked(folder, index))
        children.append(child)
    num_failed = work(folder, 0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return int(num_failed > 0 or any(codes))


def work(folder: Path, worker: int) -> int:
    """Compile orders until there will be no more; returns how many failed."""
    num_failed = 0
    for path in _orders(folder):
        order = msgspec.msgpack.decode(path.read_bytes(), type=KernelOrder)
        began_s, compile_s, launcher_s, error = time.time(), 0.0, 0.0, None
        try:
            kernel = load_kernel(order)
            compile_s = time.time() - began_s
            if HAS_LAUNCHERS and _claim(folder, _launcher_name(kernel)):
                _build_launcher(kernel)
                launcher_s = time.time() - began_s - compile_s
        except Exception as failure:
            traceback.print_exc()
            error = f"{order.name}: {type(failure).__name__}: {str(failure)[:200]}"
            num_failed += 1
        done = Compiled(order.name, worker, began_s, compile_s, launcher_s, error)
        publish(folder / "done" / path.name, encoded(done))
    return num_failed


def encoded(message: KernelOrder | Compiled) -> bytes:
    """As it lies in the folder."""
    return msgspec.msgpack.encode(message)


def result(path: Path) -> Compiled:
    """What a worker has written."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Compiled)


def publish(path: Path, content: bytes) -> None:
    """Write a file that nobody sees half."""
    hidden = path.parent.parent / f"{path.parent.name}-{path.name}"
    hidden.write_bytes(content)
    hidden.rename(path)


def _orders(folder: Path) -> Iterator[Path]:
    """Each order that this process has claimed, longest first among those there; ends when there will be no more."""
    known: set[str] = set()
    while True:
        is_complete = (folder / END).exists()  # asked before the list is read
        for name in sorted(set(os.listdir(folder / "orders")) - known, reverse=True):
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


def _forked(folder: Path, index: int) -> int:
    try:
        _die_with_parent()
        return int(work(folder, index) > 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _absent_gpu(target: GPUTarget) -> Any:
    """As much of a driver as the compiler asks for: no CUDA context is made, which takes memory and half a second."""
    return SimpleNamespace(
        get_current_device=lambda: 0, get_current_target=lambda: target, launcher_cls=nvidia.CudaLauncher
    )


def hash_compiler() -> None:
    """Triton's cache keys hold a hash of its own files, some 400 MB, which it reads once a process."""
    from triton.runtime.cache import triton_key  # not in every version; then the first kernel has it read

    triton_key()


def _launcher_name(kernel: Any) -> str:
    """One for all kernels that are launched by the same C module."""
    shape = (list(kernel.src.signature.values()), getattr(kernel.metadata, "tensordesc_meta", None))
    return "launcher-" + hashlib.sha256(repr(shape).encode()).hexdigest()


def _build_launcher(kernel: Any) -> None:
    """What Triton otherwise does when a kernel is first loaded, 0.2 s each."""
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    sys.exit(main())
