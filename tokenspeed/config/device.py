"""What the machine has, as far as this process may use it. Reads the operating system; no torch, no configuration."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import psutil

from tokenspeed.config.gpu import GpuInfo, find_gpus, torch_obstacle

_SYS = Path("/sys")
_PROC = Path("/proc")


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as `resolve` sees it.

    Fields:
        num_cores: logical cores this process may run on (affinity, then the cgroup's CPU quota, rounded down, at
            least 1).
        num_physical_cores: physical cores among them.
        memory_total_bytes, memory_available_bytes: of the machine, or of the cgroup where that is less.
        cpu_name: for the log.
        cpu_flags: instruction set names as Linux spells them (`avx512_bf16`, `amx_bf16`); empty where unknown.
        gpus: NVIDIA GPUs this process may use, in CUDA's order; empty when the engine could not use any.
        gpu_obstacle: why `gpus` is empty, in words.
    """

    num_cores: int
    num_physical_cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    cpu_name: str = ""
    cpu_flags: frozenset[str] = frozenset()
    gpus: tuple[GpuInfo, ...] = ()
    gpu_obstacle: str | None = "no NVIDIA GPU was looked for"


def read_device_info(sys_root: Path = _SYS, proc_root: Path = _PROC) -> DeviceInfo:
    """Look at this machine now.

    Args:
        sys_root, proc_root: where Linux shows itself; other folders in tests.
    """
    cores = _allowed_cores()
    quota = _cgroup_cpus(sys_root)
    num_physical = _physical_cores(cores, sys_root)
    num_cores = len(cores)
    if quota is not None:
        limit = max(1, int(quota))
        num_cores, num_physical = min(num_cores, limit), min(num_physical, limit)
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    cgroup = _cgroup_memory(sys_root)
    if cgroup is not None:
        limit, used = cgroup
        total, available = min(total, limit), min(available, max(0, limit - used))
    name, flags = _cpu_identity(proc_root)
    gpus, gpu_obstacle = find_gpus(os.environ)
    if gpus and (gpu_obstacle := torch_obstacle()) is not None:
        gpus = ()
    return DeviceInfo(
        num_cores=num_cores,
        num_physical_cores=num_physical,
        memory_total_bytes=total,
        memory_available_bytes=available,
        cpu_name=name,
        cpu_flags=flags,
        gpus=gpus,
        gpu_obstacle=gpu_obstacle,
    )


def _allowed_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cores: set[int], sys_root: Path) -> int:
    """Distinct sets of hardware threads among `cores`. Threads of one core share its vector units."""
    siblings: set[str] = set()
    for core in cores:
        text = _read(sys_root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if text is None:
            return max(1, min(len(cores), psutil.cpu_count(logical=False) or len(cores)))
        siblings.add(text)
    return max(1, len(siblings))


def _cgroup_cpus(sys_root: Path) -> float | None:
    """CPU quota of a container in cores, or None. cgroup v2, then v1."""
    text = _read(sys_root / "fs/cgroup/cpu.max")
    if text is not None:
        words = text.split()
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota = _read_int(sys_root / "fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read_int(sys_root / "fs/cgroup/cpu/cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _cgroup_memory(sys_root: Path) -> tuple[int, int] | None:
    """(limit, used without droppable file cache) in bytes, or None where there is no limit. cgroup v2, then v1."""
    for folder, limit_name, used_name, cache_name in (
        (sys_root / "fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (sys_root / "fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
        if limit is None or used is None:
            continue
        for line in (_read(folder / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == cache_name:
                used = max(0, used - int(value))
        return limit, used
    return None


def _cpu_identity(proc_root: Path) -> tuple[str, frozenset[str]]:
    """(name, flags) of the first CPU. x86 spells the key `flags`, ARM `Features`."""
    name, flags = "", frozenset[str]()
    for line in (_read(proc_root / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key == "model name" and not name:
            name = value.strip()
        if key in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return name or platform.processor() or platform.machine(), flags


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    """A file with one number; None when it is missing or says `max`."""
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
