"""Real compile workers: kernels are listed, ordered, compiled in other processes and found on the disk. No GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def test_a_worker_waits_for_the_target_until_the_engine_has_ended(folder: Path) -> None:
    (folder / compile_folder.END).touch()
    assert compile_worker._target(folder) is None
    wanted = compile_folder.Target("cuda", 90, 32)
    compile_folder.publish(folder / compile_folder.TARGET, wanted)
    assert compile_worker._target(folder) == wanted
    shutil.rmtree(folder)
    assert compile_worker._target(folder) is None
