"""DeviceInfo from a made-up /sys and /proc, and from this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tokenspeed.config.device import read_device_info

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """A folder to be /sys and /proc; `write(path, text)` fills it."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return tmp_path, write


def test_this_machine():
    info = read_device_info()
    assert 1 <= info.num_physical_cores <= info.num_cores <= (os.cpu_count() or 1)
    assert 0 < info.memory_available_bytes <= info.memory_total_bytes


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is a Linux notion")
def test_affinity_limits_cores():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from tokenspeed.config.device import read_device_info\n"
        "info = read_device_info(); print(info.num_cores, info.num_physical_cores)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_hardware_threads_of_one_core_count_once(machine, monkeypatch):
    root, write = machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for core, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        write(f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings + "\n")
    info = read_device_info(root, root)
    assert (info.num_cores, info.num_physical_cores) == (4, 2)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"fs/cgroup/cpu.max": "20000 100000\n"}, 1),  # a fifth of a core still gets one thread
        ({"fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({}, 4),
    ],
)
def test_cpu_quota_of_a_container(machine, monkeypatch, files, cores):
    root, write = machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for path, text in files.items():
        write(path, text)
    assert read_device_info(root, root).num_cores == cores


def test_memory_limit_of_a_container(machine):
    root, write = machine
    limit = 64 * 2**20  # below any machine that runs this
    write("fs/cgroup/memory.max", f"{limit}\n")
    write("fs/cgroup/memory.current", f"{limit // 2}\n")
    write("fs/cgroup/memory.stat", f"anon 1\ninactive_file {limit // 4}\n")
    info = read_device_info(root, root)
    assert info.memory_total_bytes == limit
    assert info.memory_available_bytes == limit - limit // 4, "droppable file cache is free memory"


def test_no_memory_limit(machine):
    root, write = machine
    write("fs/cgroup/memory.max", "max\n")
    write("fs/cgroup/memory.current", "5\n")
    assert read_device_info(root, root).memory_total_bytes == read_device_info().memory_total_bytes


def test_cpu_identity(machine):
    root, write = machine
    write("cpuinfo", "processor : 0\nmodel name\t: A CPU: fast\nflags\t\t: fpu avx512_bf16\n\nflags : other\n")
    info = read_device_info(root, root)
    assert (info.cpu_name, info.cpu_flags) == ("A CPU: fast", frozenset({"fpu", "avx512_bf16"}))


def test_arm_spelling_and_no_cpuinfo(machine):
    root, write = machine
    assert read_device_info(root, root).cpu_flags == frozenset()
    write("cpuinfo", "processor : 0\nFeatures : fp asimd bf16\n")
    assert "bf16" in read_device_info(root, root).cpu_flags
