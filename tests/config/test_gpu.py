"""GPUs found without torch: what the driver says, what CUDA_VISIBLE_DEVICES hides, and every way it can fail."""

from __future__ import annotations

import os
import stat
import sys
import types

import pytest

from tokenspeed.config import gpu
from tokenspeed.config.device import read_device_info
from tokenspeed.config.gpu import GpuInfo, ProbeFailed, find_gpus, torch_obstacle

GIB = 2**30
H200 = GpuInfo(name="NVIDIA H200", memory_total_bytes=140 * GIB, compute_capability=(9, 0), uuid="GPU-aa11")
OTHERS = [GpuInfo(name="x", memory_total_bytes=GIB, compute_capability=(8, 0), uuid=f"GPU-bb{i}") for i in range(2)]
ALL = [H200, *OTHERS]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a script in place of nvidia-smi, and no NVML package."""
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ALL),
        ("0", [H200]),
        ("2,0", [ALL[2], ALL[0]]),
        ("GPU-bb1", [ALL[2]]),
        ("GPU-bb", []),  # not unique
        ("1,9,0", [ALL[1]]),  # the first unknown one ends the list, as CUDA does
        ("0,0", [H200]),
        ("-1", []),
        (" 1 , 2 ", ALL[1:]),
    ],
)
def test_visible_devices(visible, found):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus, obstacle = find_gpus(environment, lambda: ALL)
    assert list(gpus) == found
    assert (obstacle is None) == bool(found)
    if not found:
        assert visible in obstacle and "3 GPUs" in obstacle


def test_hidden_gpus_are_not_looked_for():
    gpus, obstacle = find_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda: pytest.fail("looked"))
    assert (gpus, "CUDA_VISIBLE_DEVICES is empty" in obstacle) == ((), True)


def test_no_gpu_and_no_driver():
    assert "no GPU" in find_gpus({}, list)[1]

    def fail() -> list[GpuInfo]:
        raise ProbeFailed("the driver sleeps")

    assert find_gpus({}, fail) == ((), "the driver sleeps")


def test_the_program(program):
    program('echo "NVIDIA H200, 143771, 9.0, GPU-1"; echo "NVIDIA H200, 143771, 9.0, GPU-2"')
    gpus, obstacle = find_gpus({"CUDA_VISIBLE_DEVICES": "1"})
    assert obstacle is None
    assert gpus == (
        GpuInfo(name="NVIDIA H200", memory_total_bytes=143771 * 2**20, compute_capability=(9, 0), uuid="GPU-2"),
    )


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("echo 'No devices were found' >&2; exit 6", "code 6: No devices were found"),
        ("exit 9", "code 9"),
        ("echo '[N/A], x'", "[N/A], x"),
        ("true", "reports no GPU"),
    ],
)
def test_a_program_that_fails(program, script, part):
    program(script)
    gpus, obstacle = find_gpus({})
    assert gpus == ()
    assert part in obstacle


def test_a_hung_driver_does_not_hang_the_command(program, monkeypatch):
    """Waiting for the program would pass the time limit of a test."""
    monkeypatch.setattr(gpu, "PROBE_TIMEOUT_S", 0.2)
    program("exec sleep 600")
    assert "the driver hangs" in find_gpus({})[1]


def test_nvml(monkeypatch):
    calls = []

    class NVMLError(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",  # old bindings answer in bytes
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=140 * GIB),
        nvmlDeviceGetUUID=lambda handle: "GPU-aa11",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    assert find_gpus({}) == ((H200,), None)
    assert calls == ["init", "shutdown"]

    def broken() -> None:
        raise NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = broken
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert "no NVIDIA driver" in find_gpus({})[1]


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        (
            "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\n",
            "torch 2.13.0+cpu is built without",
        ),
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", None),
        ("cuda = None\n", "built without CUDA"),
        ("", None),
    ],
)
def test_torch_is_asked_by_its_version_file(tmp_path, monkeypatch, text, obstacle):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "version.py").write_text(text)
    found = torch_obstacle(tmp_path)
    assert found is None if obstacle is None else obstacle in found


def test_torch_or_triton_missing(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text("cuda = '13.0'\n")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in torch_obstacle(tmp_path)
    assert "torch is not installed" in torch_obstacle()


def test_gpus_without_a_torch_that_can_use_them_do_not_count(monkeypatch):
    monkeypatch.setattr("tokenspeed.config.device.find_gpus", lambda environment: ((H200,), None))
    monkeypatch.setattr("tokenspeed.config.device.torch_obstacle", lambda: "torch is old")
    info = read_device_info()
    assert (info.gpus, info.gpu_obstacle) == ((), "torch is old")
    monkeypatch.setattr("tokenspeed.config.device.torch_obstacle", lambda: None)
    info = read_device_info()
    assert (info.gpus, info.gpu_obstacle) == ((H200,), None)
