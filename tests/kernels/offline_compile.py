"""Kernels compiled for a GPU that is not here, in processes of their own: this one may have Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""What a program may have, by compute capability: A100; A10 and RTX 30; L40S and RTX 40; Hopper; RTX 50."""


def start(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `script`, which finds `build` here; its Triton keeps what it compiles in `folder`."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def build(
    kernel: Any,
    constants: dict[str, object],
    kinds: dict[str, str],
    capability: int,
    num_warps: int,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> Any:
    """Compile a kernel; it fits that GPU.

    Args:
        constants: of its arguments, None for those that are left out.
        kinds: of the others, where that is not int32. Pointers are to 16 bytes, and so are the numbers `aligned`.
    Raises:
        AssertionError: it needs more shared memory than there is.
    """
    import triton  # where scripts compile, not where tests are collected
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*") or name in aligned
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = made.metadata.shared
    assert shared <= SHARED_BYTES[capability], f"{kernel.__name__} {constants} on {capability}: {shared} bytes"
    return made
