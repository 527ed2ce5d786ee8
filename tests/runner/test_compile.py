"""Compile workers: who starts them with what, what their failure costs, and when they are not needed.

Workers here are a small Python program in place of the real one; there is no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import msgspec
import pytest
from compile_support import CONFIG

from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner import compile, compile_folder, compile_start
from tokenspeed.runner.compile import start_compile
from tokenspeed.runner.compile_folder import Compiled, Target, publish, target
from tokenspeed.runner.compile_list import list_kernels
from tokenspeed.runner.compile_start import Workers, num_workers, prepare_cache, start_early, start_workers

ORDERS = [KernelOrder("m", "a", "{}", 9), KernelOrder("m", "b", "{}", 1000)]
DONE = """
import os, sys, time
from pathlib import Path
import msgspec
folder = Path(sys.argv[1])
while not (folder / "end").exists():
    time.sleep(0.01)
for name in os.listdir(folder / "orders"):
    order = msgspec.msgpack.decode((folder / "orders" / name).read_bytes())
    done = dict(name=order["name"], worker=0, began_s=0.0, compile_s=1.5, launcher_s=0.5, error=ERROR)
    (folder / name).write_bytes(msgspec.msgpack.encode(done))
    (folder / name).rename(folder / "done" / name)
"""
COMPILES = DONE.replace("ERROR", "None")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A cache folder, a made-up GPU, and workers that run the given code."""
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, "")  # so that what the code sets is undone
    monkeypatch.delenv(compile_start.CACHE_VARIABLE)
    monkeypatch.setattr(compile_start, "cache_folders", lambda: [tmp_path / "cache"])
    cuda = types.SimpleNamespace(
        get_device_capability=lambda: (9, 0), get_device_name=lambda: "A GPU", empty_cache=lambda: None
    )
    monkeypatch.setattr(compile.torch, "cuda", cuda)
    real = subprocess.Popen
    started = []

    def use(code: str) -> list[subprocess.Popen[bytes]]:
        def popen(command, **named):
            assert command[1:3] == ["-m", "tokenspeed.runner.compile_process"]
            started.append(real([sys.executable, "-c", code, *command[3:]], **named))
            return started[-1]

        monkeypatch.setattr(compile_start.subprocess, "Popen", popen)
        return started

    return use


def test_as_many_workers_as_cores():
    assert num_workers(CONFIG) == 3
    assert num_workers(msgspec.structs.replace(CONFIG, num_threads=200)) == compile_start.MAX_WORKERS


def test_success_is_remembered(machine, tmp_path):
    started = machine(COMPILES)
    with start_compile(CONFIG) as job:
        assert job.takes_orders
        folder = job._workers.folder
        assert target(folder) == Target("cuda", 90, 32)
        for order in ORDERS:
            job.order(order)
        loaded = []
        assert re.match(
            r"kernels: 2 compiled by 1 processes in .* s \(work of 4\.0 s, .*1\.5 s\)$", job.wait(True, loaded.append)
        )
        assert sorted(loaded, key=lambda order: order.name) == ORDERS, "each as soon as it is there"
        assert not folder.exists()
    assert started[0].args[-2:] == ["3", str(os.getpid())]
    assert os.environ[compile_start.CACHE_VARIABLE] == str(tmp_path / "cache/triton")
    with start_compile(CONFIG) as job:
        assert not job.takes_orders and "compiled before" in job.wait(True)
    assert len(started) == 1
    with start_compile(msgspec.structs.replace(CONFIG, page_size=32)) as job:
        job.wait(True)
    assert len(started) == 2, "another page size is another set of kernels"
    elsewhere = msgspec.structs.replace(CONFIG, checkpoint=msgspec.structs.replace(CONFIG.checkpoint, name="y"))
    with start_compile(msgspec.structs.replace(elsewhere, seed=9)) as job:
        assert "compiled before" in job.wait(True)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (DONE.replace("ERROR", "'no such kernel'"), "no such kernel"),
        ("print('out of luck'); raise SystemExit(1)", "ended with code 1: out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
        ("pass", "they left some"),
    ],
)
def test_failed_workers_cost_time_only(machine, caplog, code, told):
    machine(code)
    for _ in range(2):  # it is tried again
        loaded = []
        with start_compile(CONFIG) as job:
            for order in ORDERS:
                job.order(order)
            assert "; 2 failed, the rest is compiled when first used" in job.wait(True, loaded.append)
        assert not loaded
    assert told in caplog.text


def test_a_kernel_that_cannot_be_loaded_says_so_when_it_is_used(machine, caplog):
    machine(COMPILES)

    def load(order):
        raise RuntimeError("too much shared memory")

    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True, load)
    assert "a was not loaded ahead: RuntimeError: too much shared memory" in caplog.text


def test_workers_end_with_the_engine(machine):
    started = machine("import time; time.sleep(60)")
    with pytest.raises(ZeroDivisionError), start_compile(CONFIG) as job:
        folder = job._workers.folder
        raise ZeroDivisionError
    assert [worker.poll() for worker in started] == [-9]
    assert not folder.exists()


def test_workers_that_hang_are_given_up(machine, monkeypatch, caplog):
    """Waiting for them would pass the time limit of a test."""
    monkeypatch.setattr(compile, "WORKER_TIMEOUT_S", 0.3)
    started = machine("import time; time.sleep(600)")
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 failed" in job.wait(True)
    assert "took more than" in caplog.text
    assert all(worker.poll() is not None for worker in started)


def test_workers_that_cannot_be_started_cost_time_only(machine, monkeypatch, caplog, tmp_path):
    machine(COMPILES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def popen(*_, **named):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(compile_start.subprocess, "Popen", popen)
    with start_compile(CONFIG) as job:
        assert not job.takes_orders and "no workers could be started" in job.wait(True)
    assert "Resource temporarily unavailable" in caplog.text
    assert not list(tmp_path.glob("tokenspeed-compile-*")), "its folder is gone"


def test_a_folder_that_cannot_be_filled_does_not_stay(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdir = Path.mkdir

    def full(path, *args, **named):
        if path.name == "done":
            raise OSError(28, "No space left on device")
        mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    assert start_workers(2) is None and "No space left on device" in caplog.text
    assert not os.listdir(tmp_path)


def test_who_still_writes_does_not_find_the_folder(monkeypatch, tmp_path):
    """A file that appears while the folder is emptied would keep it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, rmtree = compile_folder.work_folder(), shutil.rmtree

    def emptied(path, **named):
        with pytest.raises(FileNotFoundError):
            (folder / "done" / "late").touch()
        rmtree(path, **named)

    monkeypatch.setattr(shutil, "rmtree", emptied)
    for _ in range(2):
        compile_folder.remove(folder)
        assert not os.listdir(tmp_path)


def test_a_worker_that_dies_halfway_costs_its_kernel_only(machine, tmp_path, caplog):
    """The others go on, and the cache is not complete."""
    machine(COMPILES.replace('os.listdir(folder / "orders")', 'os.listdir(folder / "orders")[:1]') + "\nsys.exit(1)")
    loaded = []
    with start_compile(CONFIG) as job:
        for order in ORDERS:
            job.order(order)
        assert "1 compiled by 1 processes" in (told := job.wait(True, loaded.append)) and "; 1 failed" in told
        assert len(loaded) == 1 and not job.has_loaded_all
    assert "ended with code 1" in caplog.text
    assert not list(tmp_path.glob("cache/triton/warm-*"))


def test_a_folder_that_goes_costs_time_only(machine, caplog):
    machine("import time; time.sleep(60)")
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        shutil.rmtree(job._workers.folder)
        assert "; 1 failed, the rest is compiled when first used" in job.wait(True)
    assert "No such file" in caplog.text


def test_workers_are_there_before_the_gpu_is_asked(machine, monkeypatch):
    started = machine(COMPILES)
    monkeypatch.setattr(compile.torch, "cuda", None)
    assert start_early(msgspec.structs.replace(CONFIG, device="cpu")) is None and not started
    early = start_early(CONFIG)
    assert isinstance(early, Workers) and target(early.folder) is None and early.process.poll() is None
    with pytest.raises(AttributeError):
        start_compile(CONFIG, early)
    assert early.process.poll() == -9 and not early.folder.exists(), "the GPU did not answer"


def test_without_a_cache_folder_nothing_is_started(machine, monkeypatch):
    started = machine(COMPILES)
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, "/proc/nowhere")
    for start in (start_compile, start_early):
        with pytest.raises(ConfigError, match="no folder for compiled GPU kernels can be written"):
            start(CONFIG)
    assert not started


def test_early_workers_are_taken_over(machine):
    started = machine(COMPILES)
    early = start_early(CONFIG)
    with start_compile(CONFIG, early) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True)
    assert [worker.poll() for worker in started] == [0] and not early.folder.exists()
    assert start_early(CONFIG) is None, "all is there"
    with start_compile(CONFIG) as job:
        assert "compiled before" in job.wait(True)
    assert len(started) == 1


def test_the_marker_is_of_the_gpu(machine, monkeypatch):
    started = machine(COMPILES)
    for count, name in ((1, "A GPU"), (2, "B GPU"), (2, "A GPU")):
        monkeypatch.setattr(compile.torch.cuda, "get_device_name", lambda name=name: name)
        with start_compile(CONFIG, start_early(CONFIG)) as job:
            if job.takes_orders:
                job.order(ORDERS[0])
            job.wait(True)
        assert len(started) == count


def test_early_workers_for_what_is_there_are_ended(machine):
    """Two engines start at once, and the other one was quicker."""
    machine(COMPILES)
    early = start_early(CONFIG)
    prepare_cache(CONFIG).marker(f"A GPU, CUDA {compile.torch.version.cuda}").touch()
    with start_compile(CONFIG, early) as job:
        assert "compiled before" in job.wait(True)
    assert early.process.poll() is not None and not early.folder.exists()


def test_a_kernel_is_loaded_when_its_launcher_is_there(machine):
    """Else the engine would run the C compiler, while all others wait."""
    machine("import time; time.sleep(60)")
    loaded = []
    with start_compile(CONFIG) as job:
        folder = job._workers.folder
        for order, launcher in zip(ORDERS, ("slow", None), strict=True):
            job.order(order)
            publish(folder / "done" / sorted(job._orders)[-1], Compiled(order.name, 0, 0.0, 1.0, 0.0, None, launcher))
        assert job._take_results(folder, loaded.append) == 1 and loaded == ORDERS[1:]
        assert job._take_results(folder, loaded.append) == 0
        (folder / "launchers" / "slow").touch()
        assert job._take_results(folder, loaded.append) == 1 and loaded == ORDERS[::-1]


def test_whether_all_is_loaded(machine):
    machine(COMPILES)
    for load, is_all in ((lambda _: None, True), (lambda order: 1 // (order.name == "a"), False)):
        with start_compile(CONFIG) as job:
            assert not job.has_loaded_all
            for order in ORDERS:
                job.order(order)
            job.wait(True, load)
        assert job.has_loaded_all == is_all
        compile_start.prepare_cache(CONFIG).marker(f"A GPU, CUDA {compile.torch.version.cuda}").unlink()


def test_a_launcher_that_nobody_built_is_not_waited_for(machine):
    machine(COMPILES.replace("launcher_s=0.5", "launcher_s=0.5, launcher='lost'"))
    loaded = []
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True, loaded.append)
    assert loaded == ORDERS[:1]


def test_starting_workers_takes_neither_torch_nor_triton():
    """They would not be started early, and would not hear of the engine's death meanwhile."""
    parts = "tokenspeed.engine.process, tokenspeed.runner.compile_process"
    code = f"import sys, {parts}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_list_that_failed_is_not_remembered(machine, tmp_path):
    """Regression: the cache counted as complete, and no later start had workers."""
    started = machine(COMPILES)
    for count, orders in ((1, []), (2, ORDERS[:1])):
        with start_compile(CONFIG) as job:
            assert not list_kernels(msgspec.structs.replace(CONFIG, device="nowhere"), job.order)
            for order in orders:
                job.order(order)
            job.wait(False)
        assert len(started) == count and not list(tmp_path.glob("cache/triton/warm-*"))
    with start_compile(CONFIG) as job:
        job.wait(True)
    assert not list(tmp_path.glob("cache/triton/warm-*")), "nothing was ordered"


def test_late_workers_end_when_the_gpu_does_not_answer(machine, monkeypatch):
    started = machine("import time; time.sleep(60)")
    prepare_cache(CONFIG).marker("another").touch()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_compile(CONFIG)
    assert [worker.poll() for worker in started] == [-9]
    monkeypatch.setattr(compile.torch.cuda, "get_device_capability", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_compile(CONFIG)
    assert len(started) == 1, "the GPU is asked before they are started"
