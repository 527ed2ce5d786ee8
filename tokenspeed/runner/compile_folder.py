"""The folder between the engine and its compile workers: who orders what, who has it, how it went. No torch, no Triton.

target           what to compile for; there once the engine knows its GPU
orders/NAME      a kernel's description; NAME sorts by how long it will take
claims/NAME      empty: somebody has it
launchers/NAME   empty: this C module has been built, or could not be
done/NAME        a `Compiled`: how it went
end              empty: no order will follow
log              what the workers say
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

POLL_S = 0.01
END = "end"
TARGET = "target"
FOLDERS = ("orders", "claims", "launchers", "done")


class Compiled(msgspec.Struct, frozen=True):
    """A finished order.

    Fields:
        name: of the kernel. error: None = it is in the cache.
        began_s: time since the epoch. compile_s: of the kernel. launcher_s: of the C module that launches it, 0 if
            another order had the same.
        launcher: in `launchers`, when that module is there; None where Triton needs none.
    """

    name: str
    worker: int
    began_s: float
    compile_s: float
    launcher_s: float
    error: str | None = None
    launcher: str | None = None


class Target(msgspec.Struct, frozen=True):
    """A GPU, as Triton names it."""

    backend: str
    arch: int
    warp_size: int


def work_folder() -> Path:
    """A new one."""
    work = Path(tempfile.mkdtemp(prefix="tokenspeed-compile-"))
    try:
        for name in FOLDERS:
            (work / name).mkdir()
    except BaseException:
        remove(work)
        raise
    return work


def remove(work: Path) -> None:
    """With all that is in it. Workers that still write do not find it under another name. Safe to call again."""
    gone = work.with_name(f"{work.name}-gone")
    with contextlib.suppress(OSError):
        work.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def publish(path: Path, message: Any) -> None:
    """Write a message; nobody sees half of it."""
    hidden = path.parent / f".{path.name}"
    hidden.write_bytes(msgspec.msgpack.encode(message))
    hidden.rename(path)


def names(folder: Path) -> set[str]:
    """Of all messages that are there."""
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def result(path: Path) -> Compiled:
    """What a worker has written."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Compiled)


def target(folder: Path) -> Target | None:
    """None as long as it is not known."""
    try:
        return msgspec.msgpack.decode((folder / TARGET).read_bytes(), type=Target)
    except FileNotFoundError:
        return None
