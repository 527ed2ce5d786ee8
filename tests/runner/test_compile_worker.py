"""Real compile workers: kernels are listed, ordered, compiled in other processes and found on the disk. No GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.runner import compile_folder, compile_worker

SCRIPT = Path(__file__).with_name("compile_for_nobody.py")


def test_what_workers_compile_is_found(tmp_path: Path) -> None:
    """In a process of its own: the interpreter of the other tests is switched on for good."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    assert lines[0] == "listed 2" and lines[-1] == "loaded 2 compiled 0", ran.stdout + ran.stderr[-3000:]
    assert lines[1].startswith("kernels: 2 compiled by ") and "failed" not in lines[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in compile_folder.FOLDERS:
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_longest_source_comes_first_and_nobody_works_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[str] = []

    def load(order: KernelOrder) -> None:
        worked.append(order.name)
        if order.name == "bad":
            raise ValueError("no such type")

    monkeypatch.setattr(compile_worker, "load_kernel", load)
    monkeypatch.setattr(compile_worker, "HAS_LAUNCHERS", False)
    for name, place in (("short", "000010-0000"), ("long", "000900-0001"), ("bad", "000500-0002"), ("taken", "1")):
        compile_folder.publish(folder / "orders" / place, KernelOrder("m", name, "{}", 1))
    (folder / "claims" / "1").touch()
    (folder / compile_folder.END).touch()
    assert compile_worker.work(folder, 3) == 1
    assert worked == ["long", "bad", "short"]
    assert compile_worker.work(folder, 4) == 0 and len(worked) == 3
    done = [compile_folder.result(path) for path in sorted((folder / "done").iterdir())]
    assert [(one.name, one.worker, one.error) for one in done] == [
        ("short", 3, None),
        ("bad", 3, "bad: ValueError: no such type"),
        ("long", 3, None),
    ]


def test_a_launcher_is_built_once_and_missed_by_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler it cannot be built; who waits for it goes on all the same."""
    built: list[str] = []

    def launcher(source: object, metadata: object) -> None:
        built.append("one")
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(compile_worker, "load_kernel", lambda order: SimpleNamespace(src=None, metadata=None))
    monkeypatch.setattr(compile_worker, "HAS_LAUNCHERS", True)
    monkeypatch.setattr(compile_worker, "_launcher_name", lambda kernel: "same")
    monkeypatch.setattr(compile_worker.nvidia, "CudaLauncher", launcher)
    for place, name in (("1", "a"), ("2", "b")):
        compile_folder.publish(folder / "orders" / place, KernelOrder("m", name, "{}", 1))
    (folder / compile_folder.END).touch()
    assert compile_worker.work(folder, 0) == 1 and built == ["one"]
    done = [compile_folder.result(path) for path in sorted((folder / "done").iterdir())]
    assert [(one.name, one.launcher) for one in done] == [("a", "same"), ("b", "same")]
    assert (folder / "launchers" / "same").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12: there are threads here
def test_a_worker_that_dies_halfway_leaves_the_rest_to_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(order: KernelOrder) -> None:
        if order.name == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(compile_worker, "load_kernel", load)
    monkeypatch.setattr(compile_worker, "HAS_LAUNCHERS", False)
    names = {"1": "first", "2": "deadly", "3": "third"}
    for place, name in names.items():
        compile_folder.publish(folder / "orders" / place, KernelOrder("m", name, "{}", 1))
    (folder / compile_folder.END).touch()
    assert compile_worker._fork(folder, 2) == 1
    assert compile_folder.names(folder / "claims") == set(names)
    assert compile_folder.names(folder / "done") == {"1", "3"}


STARTS = """
import sys, time
from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.runner.compile_folder import TARGET, Target, names, publish
from tokenspeed.runner.compile_start import start_workers
workers = start_workers(2)
if sys.argv[1] == "at work":
    publish(workers.folder / TARGET, Target("cuda", 90, 32))
    publish(workers.folder / "orders" / "1", KernelOrder("no.such.module", "a", "{}", 1))
    while not names(workers.folder / "done"):
        time.sleep(0.01)
print(workers.folder, flush=True)
time.sleep(600)
"""


def processes_of(folder: str) -> list[str]:
    """Command lines of those that were told of the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [line for line in [path.read_text()] if folder in line]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says that a parent has died")
@pytest.mark.parametrize("moment", ["at once", "at work"])
def test_an_engine_that_is_killed_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """Regression: the folder stayed when a start took too long, was interrupted, or lost its front end."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    engine = subprocess.Popen(
        [sys.executable, "-c", STARTS, moment], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    folder = engine.stdout.readline().strip()
    assert folder.startswith(str(tmp_path)) and processes_of(folder)
    engine.kill()
    engine.communicate()
    deadline_s = time.monotonic() + 60.0
    while (left := [*processes_of(folder), *tmp_path.glob("tokenspeed-compile-*")]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left


def test_a_worker_waits_for_the_target_until_the_engine_has_ended(folder: Path) -> None:
    (folder / compile_folder.END).touch()
    assert compile_worker._target(folder) is None
    wanted = compile_folder.Target("cuda", 90, 32)
    compile_folder.publish(folder / compile_folder.TARGET, wanted)
    assert compile_worker._target(folder) == wanted
    shutil.rmtree(folder)
    assert compile_worker._target(folder) is None
