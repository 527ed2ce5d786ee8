"""Which NVIDIA GPUs this process may use, found without torch: NVML, or the `nvidia-smi` program, under a time limit.

Knows what the driver and the installed torch say of themselves; whether a GPU is good enough for the engine is decided
by `resolve`. Nothing here starts a CUDA context, so asking costs no GPU memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

PROBE_TIMEOUT_S = 20.0
"""The driver may take seconds to wake a GPU that nobody keeps open; a hung one must not hang the command."""

MIB = 2**20


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Fields:
        memory_total_bytes: as the driver reports it.
        compute_capability: (9, 0) for Hopper.
        uuid: `GPU-...`, for CUDA_VISIBLE_DEVICES.
    """

    name: str
    memory_total_bytes: int
    compute_capability: tuple[int, int]
    uuid: str = ""


class ProbeFailed(Exception):
    """The GPUs cannot be listed; the message says why."""


def find_gpus(
    environment: Mapping[str, str], list_gpus: Callable[[], list[GpuInfo]] | None = None
) -> tuple[tuple[GpuInfo, ...], str | None]:
    """The GPUs visible to this process in CUDA's order, and, when there are none to use, what is missing.

    The order is that of the PCI bus; on a machine with GPUs of different kinds set CUDA_DEVICE_ORDER=PCI_BUS_ID, or
    CUDA may number them otherwise.

    Args:
        list_gpus: replaces the look at the machine, in tests.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return (), "CUDA_VISIBLE_DEVICES is empty, which hides every GPU"
    try:
        found = _list_gpus() if list_gpus is None else list_gpus()
    except ProbeFailed as error:
        return (), str(error)
    if not found:
        return (), "the NVIDIA driver reports no GPU"
    if visible is None:
        return tuple(found), None
    chosen = _visible(found, visible)
    if not chosen:
        return (), f"CUDA_VISIBLE_DEVICES is {visible!r}, which names none of the {len(found)} GPUs here"
    return tuple(chosen), None


def torch_obstacle(torch_folder: Path | None = None) -> str | None:
    """Why the installed torch and Triton cannot drive a GPU, or None. Reads torch's version file, imports nothing.

    Args:
        torch_folder: where torch is installed, in tests.
    """
    if torch_folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "torch is not installed"
        torch_folder = Path(spec.origin).parent
    try:
        text = (torch_folder / "version.py").read_text()
    except OSError:
        return None  # an unusual build; torch itself will say
    version = re.search(r"^__version__.*?=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*(.+?)\s*$", text, re.MULTILINE)
    if cuda is not None and cuda[1] == "None":
        named = version[1] if version else "installed"
        return f"torch {named} is built without CUDA; install a CUDA build of torch"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; `pip install triton`"
    return None


def _list_gpus() -> list[GpuInfo]:
    """By NVML where its Python package is installed, else by `nvidia-smi`."""
    if importlib.util.find_spec("pynvml") is not None:
        try:
            return _by_nvml()
        except ProbeFailed:
            pass  # a package without its driver library; the program may still be there
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ProbeFailed("no NVIDIA driver was found (neither NVML nor the nvidia-smi program)")
    return _by_program(program)


def _by_nvml() -> list[GpuInfo]:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            return [_nvml_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ProbeFailed(f"NVML, the NVIDIA driver's library, failed: {error}") from error


def _nvml_gpu(nvml: Any, handle: Any) -> GpuInfo:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuInfo(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=(int(major), int(minor)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _by_program(program: str) -> list[GpuInfo]:
    command = [program, "--query-gpu=name,memory.total,compute_cap,uuid", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"nvidia-smi gave no answer in {PROBE_TIMEOUT_S:.0f} s; the driver hangs") from error
    except OSError as error:
        raise ProbeFailed(f"nvidia-smi cannot be started: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise ProbeFailed(f"nvidia-smi failed with code {done.returncode}: {said[0]}")
    return [_parse(line) for line in done.stdout.splitlines() if line.strip()]


def _parse(line: str) -> GpuInfo:
    """`NVIDIA H200, 143771, 9.0, GPU-...`; MiB."""
    words = [word.strip() for word in line.split(",")]
    try:
        name, memory, capability, uuid = words
        major, _, minor = capability.partition(".")
        return GpuInfo(
            name=name,
            memory_total_bytes=int(memory) * MIB,
            compute_capability=(int(major), int(minor)),
            uuid=uuid,
        )
    except ValueError as error:
        raise ProbeFailed(f"nvidia-smi answered {line!r}, which is not name, memory, capability, uuid") from error


def _visible(found: list[GpuInfo], visible: str) -> list[GpuInfo]:
    """As CUDA reads the variable: indices or beginnings of UUIDs; the first word that names nothing ends the list."""
    chosen: list[GpuInfo] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdigit():
            matches = found[int(word) : int(word) + 1]
        else:
            matches = [gpu for gpu in found if word and gpu.uuid.startswith(word)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen
