"""Compile the C sources once, keep the library on disk. Knows compilers and files, not kernels.

A build is a folder `native-<key>` with the library and its SHA-256; it appears by one rename, so two processes that
build at once are safe and a half-written library is never loaded. The key covers sources, compiler, flags and the
CPU's features.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("pool.c", "pointwise.c", "matmul.c", "attention.c", "pack.c")
HEADERS = ("ts.h", "simd.h")
FLAGS = ("-std=gnu11", "-O3", "-Wno-psabi", "-pthread", "-shared", "-fPIC")
TUNING = ("-march=native", "-mcpu=native", "")
"""Spellings of "for this machine", first that the compiler takes; the last is its default target."""

LIBRARY, DIGEST = "kernels.so", "kernels.sha256"


class BuildFailed(RuntimeError):
    """The library cannot be built here; the message says why, in words for the log."""


def find_compiler() -> str | None:
    """`$CC` when set, else the first of cc, gcc, clang on PATH. None when there is none."""
    wanted = os.environ.get("CC")
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        found = shutil.which(name)
        if found is not None:
            return found
    return None


def cache_folders() -> list[Path]:
    """Where builds may be kept, best first. The last one, below the temporary folder, is private to the user."""
    folders = []
    if os.environ.get("TOKENSPEED_CACHE"):
        folders.append(Path(os.environ["TOKENSPEED_CACHE"]))
    elif os.environ.get("XDG_CACHE_HOME"):
        folders.append(Path(os.environ["XDG_CACHE_HOME"]) / "tokenspeed")
    else:
        try:
            folders.append(Path.home() / ".cache" / "tokenspeed")
        except RuntimeError:  # no home folder: an odd container
            pass
    folders.append(Path(tempfile.gettempdir()) / f"tokenspeed-{os.getuid()}")
    return folders


def build(extra_flags: tuple[str, ...] = (), folders: list[Path] | None = None) -> Path:
    """The compiled library for this machine; compiled now unless a sound copy is cached.

    Args:
        extra_flags: for tests, `-DTS_PORTABLE`.
        folders: instead of `cache_folders()`.
    Raises:
        BuildFailed: no compiler, it failed, or no folder can be written.
    """
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CC")
        if wanted:
            raise BuildFailed(f"CC is {wanted!r}, which is no program here (correct or unset it)")
        raise BuildFailed("no C compiler (install gcc or clang, or set CC)")
    source_folder = Path(__file__).parent
    name = f"native-{_key(compiler, source_folder, extra_flags)}"
    problems = []
    for folder in cache_folders() if folders is None else folders:
        ready = folder / name
        if _is_sound(ready):
            return ready / LIBRARY
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(folder):
                raise PermissionError(f"{folder} belongs to another user or others may write to it")
            with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
                fresh = Path(work) / "fresh"
                fresh.mkdir()
                _compile(compiler, source_folder, fresh / LIBRARY, extra_flags)
                (fresh / DIGEST).write_text(_digest(fresh / LIBRARY))
                _move_into_place(fresh, ready, Path(work) / "broken")
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        return ready / LIBRARY
    raise BuildFailed(f"no folder for the compiled kernels ({'; '.join(problems)}); set TOKENSPEED_CACHE")


def _is_ours(folder: Path) -> bool:
    """A library from a folder that others can write to would be their code in our process."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o002


def _is_sound(ready: Path) -> bool:
    try:
        return _is_ours(ready.parent) and (ready / DIGEST).read_text() == _digest(ready / LIBRARY)
    except OSError:
        return False


def _move_into_place(fresh: Path, ready: Path, broken: Path) -> None:
    """Rename `fresh` to `ready`. What is there already is broken (moved away) or another's equal build (kept)."""
    try:
        fresh.rename(ready)
    except OSError:
        if _is_sound(ready):
            return
        ready.rename(broken)
        fresh.rename(ready)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(compiler: str, source_folder: Path, extra_flags: tuple[str, ...]) -> str:
    key = hashlib.sha256()
    for name in HEADERS + SOURCES:
        key.update((source_folder / name).read_bytes())
    version = _run([compiler, "--version"]).stdout
    key.update(repr((compiler, version, FLAGS, TUNING, extra_flags, platform.machine(), _cpu_features())).encode())
    return key.hexdigest()[:20]


def _cpu_features() -> str:
    """Linux's flags line; elsewhere the processor's name. A cache shared between machines must not mix them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error


def _compile(compiler: str, source_folder: Path, target: Path, extra_flags: tuple[str, ...]) -> None:
    sources = [str(source_folder / name) for name in SOURCES]
    output = ""
    for tuning in TUNING:
        flags = [*FLAGS, *([tuning] if tuning else []), *extra_flags]
        command = [compiler, *flags, *sources, "-o", str(target), "-lm"]
        result = _run(command)
        if result.returncode == 0:
            return
        output = result.stderr.strip().splitlines()[0] if result.stderr.strip() else f"exit status {result.returncode}"
    raise BuildFailed(f"{compiler} failed: {output}")
