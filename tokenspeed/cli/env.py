"""`tokenspeed env`: what to paste into a bug report. Imports no device library; versions come from package metadata."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Sequence
from importlib import metadata

from tokenspeed import __version__
from tokenspeed.config.device import DeviceInfo, read_device_info
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "jinja2",
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "httpx",
    "msgspec",
    "pyzmq",
    "prometheus_client",
    "xgrammar",
    "llguidance",
    "openai",
)


def run(argv: Sequence[str]) -> int:
    """Print the report."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: tokenspeed env\n\nReports this machine and the installed packages. There are no flags.")
        return 0
    if argv:
        raise ConfigError(f"`tokenspeed env` takes no arguments, but was given: {' '.join(argv)}")
    print("\n".join(report(read_device_info())))
    return 0


def report(device: DeviceInfo) -> list[str]:
    """The report's lines, `name: value`."""
    features = [name for name in CPU_FEATURES if name in device.cpu_flags]
    total, available = device.memory_total_bytes / GIB, device.memory_available_bytes / GIB
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        f"TokenSpeed: {__version__}",
        f"Python: {sys.version.split()[0]} ({platform.python_implementation()})",
        f"Platform: {platform.platform()}",
        f"CPU: {device.cpu_name}",
        f"CPU features: {', '.join(features) or 'none known'}",
        f"Cores this process may use: {device.num_cores} ({device.num_physical_cores} physical)",
        f"Memory: {total:.1f} GiB, {available:.1f} GiB available",
        f"Open files (soft limit): {soft_files}",
        *(f"{name}: {_version(name)}" for name in PACKAGES),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
